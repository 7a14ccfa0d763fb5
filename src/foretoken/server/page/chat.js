// The conversation: what was said, how it is shown, and what of it the model is told.

import { $, html, say } from "./parts.js";

const turns = [];

/** The messages of a request: the system prompt, what was said, and one more of the user. */
export function messages(text) {
  const system = $("system").value.trim();
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...turns.filter((turn) => turn.isKept).flatMap((turn) => [
      { role: "user", content: turn.text },
      { role: "assistant", content: turn.answer.text },
    ]),
    { role: "user", content: text },
  ];
}

/** The last question once more, without its answer: what a race with an empty field is about. */
export function repeated() {
  const last = turns.findLastIndex((turn) => turn.isKept);
  if (last < 0) return null;
  const found = messages("");
  return found.slice(0, -2);
}

/** A question whose answer is about to come. */
export function ask(text, answer, onRounds) {
  const number = turns.length + 1;
  const shown = html("div", { class: "text" });
  const note = html("p", { class: "hint note" });
  const copy = html("button", { type: "button", "aria-label": `Copy answer ${number}` }, "Copy");
  const rounds = html("button", { type: "button", "aria-pressed": "false", "aria-label": `Rounds of answer ${number}` }, "Rounds");
  const nodes = [
    html("div", { class: "turn user" }, html("p", { class: "sr" }, "You"), html("div", { class: "text" }, text)),
    html("div", { class: "turn assistant" }, html("p", { class: "sr" }, "Model"), shown, note, html("p", { class: "tools" }, copy, rounds)),
  ];
  const turn = { number, text, answer, shown, note, rounds, nodes, isKept: false };
  copy.addEventListener("click", async () => say((await copied(answer.text)) ? "Copied." : "The browser does not let this page copy."));
  rounds.addEventListener("click", () => onRounds(turn));
  turns.push(turn);
  $("history").append(...nodes);
  $("history").scrollTop = $("history").scrollHeight;
  return turn;
}

/** More of the answer; who has scrolled up stays there. */
export function grow(turn, text) {
  const box = $("history");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  turn.shown.append(text);
  if (atEnd) box.scrollTop = box.scrollHeight;
}

/** The answer is there, and the model is told of it from now on. */
export function keep(turn, note) {
  turn.isKept = true;
  turn.note.textContent = note;
}

/** The answer broke off: what came of it stays to be read, and the model is not told of it. */
export function fail(turn, note) {
  for (const node of turn.nodes) node.classList.add("failed");
  turn.note.textContent = `${note} This answer is not part of the conversation.`;
}

/** As if it had not been asked. */
export function drop(turn) {
  turns.splice(turns.indexOf(turn), 1);
  for (const node of turn.nodes) node.remove();
}

/** Mark the turn whose rounds are shown. */
export function mark(turn) {
  for (const one of turns) one.rounds.setAttribute("aria-pressed", String(one === turn));
  $("rounds-which").textContent = turn ? `of answer ${turn.number}` : "";
}

export function reset() {
  turns.length = 0;
  $("history").replaceChildren();
  mark(null);
}

/** Copy a text; pages that do not come by HTTPS or from this machine have no clipboard but the old one. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = html("textarea", { class: "sr", "aria-hidden": "true" });
    const before = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    before?.focus();
    return isDone;
  }
}
