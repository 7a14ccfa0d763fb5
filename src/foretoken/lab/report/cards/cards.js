"use strict";
(() => {
  // Filters: a row and its bar are shown where every chosen value is theirs.
  const selects = [...document.querySelectorAll("select[data-filter]")];
  const items = [...document.querySelectorAll("tbody tr, .bars li")];
  const filter = () => {
    for (const item of items) {
      item.hidden = selects.some((select) => select.value && item.dataset[select.dataset.filter] !== select.value);
    }
    const rows = items.filter((item) => item.tagName === "TR");
    document.getElementById("shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} shown`;
  };
  for (const select of selects) select.addEventListener("change", filter);
  filter();
})();
