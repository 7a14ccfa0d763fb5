// Runs the page's scripts in the document of page_dom.mjs, and evaluates what comes on stdin, a JSON line each.
// Arguments: the page's address, a folder with its files as ES modules, and JSON of what was stored.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { runInThisContext } from "node:vm";

import { opened } from "./page_dom.mjs";

const [url, folder, stored] = process.argv.slice(2);
const complaints = [];
console.error = console.warn = (...values) => complaints.push(values.map(String).join(" "));
process.on("unhandledRejection", (error) => (complaints.push(String(error?.stack ?? error)), process.stderr.write(String(error?.stack) + "\n")));
process.on("uncaughtException", (error) => (complaints.push(String(error?.stack ?? error)), process.stderr.write(String(error?.stack) + "\n")));

const found = opened(url, readFileSync(join(folder, "index.html"), "utf8"), JSON.parse(stored));
for (const [name, value] of Object.entries(found)) {
  Object.defineProperty(globalThis, name, { value, writable: true, configurable: true });
}
globalThis.complaints = complaints;
globalThis.load = (name) => import(pathToFileURL(join(folder, name)));

/** Press a key where the focus is; Enter then does what a browser does of itself. */
globalThis.pressed = (values) => {
  const one = document.activeElement;
  if (!one.dispatchEvent(new Event("keydown", values)) || values.key !== "Enter" || values.ctrlKey) return;
  if (one.localName === "textarea") one.value += "\n";
  if (one.localName === "button") one.click();
};

for (const script of document.querySelectorAll("script")) {
  const file = join(folder, script.getAttribute("src"));
  if (script.getAttribute("type") === "module") await import(pathToFileURL(file));
  else runInThisContext(readFileSync(file, "utf8"), { filename: file });
}
document.dispatchEvent(new Event("DOMContentLoaded"));

const say = (values) => process.stdout.write(`${JSON.stringify(values)}\n`);
say({ ready: true });
for await (const line of createInterface({ input: process.stdin })) {
  try {
    say({ value: await (0, eval)(JSON.parse(line)), complaints, urls });
  } catch (error) {
    say({ error: String(error?.stack ?? error), complaints, urls });
  }
}
process.exit(0);
