// Elements, words and numbers: what every other part of the page is written with.

export const ORIGINS = ["accepted", "recovered", "bonus", "plain"];
export const PHASES = ["draft", "target", "verify", "overhead"];
export const $ = (id) => document.getElementById(id);

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
export const html = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

export const sum = (values) => values.reduce((total, value) => total + value, 0);
export const percent = (value) => `${(100 * value).toFixed(0)} %`;
export const ms = (seconds) => `${(1e3 * seconds).toFixed(1)} ms`;
export const probability = (value) => {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 0.001 ? "<.001" : value.toFixed(3).replace(/^0/, "");
};
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** A token so that its blanks can be seen, in one line. */
export function visible(text, longest = 60) {
  if (text === "") return "∅";
  const shown = text.replace(/\n/g, "↵").replace(/\t/g, "→").replace(/ /g, "␣");
  return shown.length > longest ? `${shown.slice(0, longest - 1)}…` : shown;
}

export const number = (value) => String(Number(value.toPrecision(3)));

export function bytes(count) {
  const power = Math.min(3, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${number(count / 1024 ** power)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

export function say(text) {
  $("status").textContent = text;
}

/** Show what went wrong, in one line; nothing hides it. */
export function complain(error) {
  $("problem").hidden = error === null;
  $("problem").textContent = error === null ? "" : error.message.replace(/\s+/g, " ").slice(0, 400);
}

export const code = (text) => html("code", {}, visible(text));

export function table(id, caption, names, rows) {
  const isNumber = (value) => typeof value === "number" || (typeof value === "string" && /^[<.\d–-]/.test(value));
  const kinds = names.map((_, column) => (rows.length && isNumber(rows[0][column]) ? "num" : ""));
  $(id).replaceChildren(html("table", {}, html("caption", { class: "sr" }, caption),
    html("thead", {}, html("tr", {}, ...names.map((name, column) => html("th", { scope: "col", class: kinds[column] }, name)))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((value, column) => html("td", { class: kinds[column] }, value)))))));
}
