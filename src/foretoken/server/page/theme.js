// Light or dark: what the system says, or what was chosen on this page.  It runs before the first paint, so that no page
// flashes in the other colours; a browser that keeps nothing for us follows the system.

(() => {
  const NAME = "foretoken-theme";
  const root = document.documentElement;
  const system = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const theme = () => root.dataset.theme ?? system();
  const stored = () => { try { return localStorage.getItem(NAME); } catch { return null; } };
  const keep = (name) => {
    try {
      if (name) localStorage.setItem(NAME, name);
      else localStorage.removeItem(NAME);
    } catch { /* it lasts until the page is closed */ }
  };

  function set(name) {
    if (name) root.dataset.theme = name;
    else delete root.dataset.theme;
  }

  function label() {
    const other = theme() === "dark" ? "Light" : "Dark";
    const button = document.getElementById("theme");
    button.textContent = other;
    button.setAttribute("aria-label", `${other} colours`);
  }

  const found = stored();
  if (found === "dark" || found === "light") set(found);
  document.addEventListener("DOMContentLoaded", () => {
    label();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
    document.getElementById("theme").addEventListener("click", () => {
      const wanted = theme() === "dark" ? "light" : "dark";
      set(wanted === system() ? "" : wanted);  // who wants what the system says follows it from now on
      keep(root.dataset.theme);
      label();
    });
  });
})();
