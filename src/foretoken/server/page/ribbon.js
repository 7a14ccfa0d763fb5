// The answer that is shown, round by round: every token with its origin, and the round that is chosen.

import { drawCost, drawHistogram, drawPositions } from "./charts.js";
import { $, html, ORIGINS, plural, sum, visible } from "./parts.js";
import { state } from "./state.js";
import { drawTree } from "./tree.js";

/** Show the rounds of an answer; more may come. */
export function show(answer) {
  state.answer = answer;
  state.chosen = -1;
  $("ribbon").replaceChildren(...answer.rounds.map(option));
  $("ribbon").removeAttribute("aria-activedescendant");
  $("empty").hidden = answer.rounds.length > 0;
  peek(-1);
  draw();
}

/** One more round of an answer. */
export function add(answer, round) {
  const index = answer.rounds.push(round) - 1;
  if (answer !== state.answer) return;
  const box = $("answer");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  $("empty").hidden = true;
  $("ribbon").append(option(round, index));
  for (const origin of ORIGINS) $(`n-${origin}`).textContent = counted(origin);
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function option(round, index) {
  const found = html("span", {
    class: "round", role: "option", id: `round-${index}`, "aria-selected": "false", "aria-label": spoken(round, index),
  }, ...round.emitted.flatMap(shownToken));
  found.addEventListener("click", () => choose(index));
  found.addEventListener("mouseenter", () => peek(index));
  found.addEventListener("mouseleave", () => peek(state.chosen));
  return found;
}

const counted = (origin) =>
  sum(state.answer.rounds.map((round) => round.emitted.filter((token) => token.origin === origin).length));

function shownToken(token) {
  const parts = token.text.split("\n");
  const children = parts.flatMap((part, index) =>
    index < parts.length - 1 ? [part, html("span", { class: "nl" }, "↵"), "\n"] : [part]);
  return [html("span", { class: `t ${token.origin}`, title: `${visible(token.text)} (${token.id}): ${token.origin}` }, ...children)];
}

function spoken(round, index) {
  const tokens = round.emitted.map((token) => `${token.origin} “${visible(token.text)}”`).join(", ");
  const drafts = Math.max(0, round.tokens.length - 1);
  return `Round ${index + 1}: ${tokens}; ${round.accepted.length} of ${plural(drafts, "draft")} accepted`;
}

const rejectedOf = (round) =>
  round.tokens.map((_, node) => node).filter((node) => node > 0 && !round.accepted.includes(node));

/** The rejected drafts of a round, below the ribbon. */
function peek(index) {
  const round = state.answer.rounds[index];
  if (!round) {
    $("peek").textContent = "\u00a0";
    return;
  }
  const rejected = rejectedOf(round);
  const drafts = Math.max(0, round.tokens.length - 1);
  const head = drafts
    ? `Round ${index + 1}: ${round.accepted.length} of ${plural(drafts, "draft")} accepted${rejected.length ? "; rejected: " : "."}`
    : `Round ${index + 1}: nothing was drafted.`;
  $("peek").replaceChildren(head, ...rejected.flatMap((node) => [html("s", {}, visible(round.texts[node], 24)), " "]));
}

export function choose(index) {
  if (!state.answer.rounds[index]) return;
  $(`round-${state.chosen}`)?.setAttribute("aria-selected", "false");
  state.chosen = index;
  const option = $(`round-${index}`);
  option.setAttribute("aria-selected", "true");
  $("ribbon").setAttribute("aria-activedescendant", option.id);
  const box = $("answer");
  if (option.offsetTop < box.scrollTop || option.offsetTop > box.scrollTop + box.clientHeight - 40) {
    box.scrollTop = Math.max(0, option.offsetTop - box.clientHeight / 2);
  }
  peek(index);
  drawTree();
  drawCost();
}

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };

export function steer(event) {
  const step = STEPS[event.key];
  if (step === undefined || !state.answer.rounds.length) return;
  event.preventDefault();
  choose(Math.min(state.answer.rounds.length - 1, Math.max(0, state.chosen + step)));
}

export function draw() {
  clearTimeout(state.due);
  state.due = 0;
  if (state.chosen < 0 && state.answer.rounds.length) choose(0);
  else drawTree();
  for (const origin of ORIGINS) $(`n-${origin}`).textContent = counted(origin);
  drawPositions();
  drawHistogram();
  drawCost();
}

export function drawSoon() {
  state.due ||= setTimeout(draw, 200);
}
