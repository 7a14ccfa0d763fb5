// The page of a foretoken server.  No library, no build step; styles are set by classes or through the CSSOM only,
// so that it runs under a content security policy of 'self'.

import { chunks, kept, read } from "./api.js";
import { drawPulse } from "./charts.js";
import { ask, drop, fail, grow, keep, mark, messages, repeated, reset } from "./chat.js";
import { poll, watch } from "./engine.js";
import { $, complain, plural, say, sum } from "./parts.js";
import { race, replay } from "./race.js";
import { add, choose, draw, drawSoon, show, steer } from "./ribbon.js";
import { isChat, state } from "./state.js";

// -- what is asked ----------------------------------------------------------------------------------------------------

/** Path and body of a request, as the form says. */
function request(speculative, text) {
  const body = {
    model: state.model,
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value),
    speculative,
  };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  if (!isChat()) return ["v1/completions", { ...body, prompt: text }];
  return ["v1/chat/completions", { ...body, messages: text.trim() ? messages(text) : repeated() }];
}

// -- running ----------------------------------------------------------------------------------------------------------

/** Buttons that cannot be used now say so, but keep the focus, which a disabled button would lose. */
function enable(isFree) {
  const isStop = isChat() && !isFree;  // in a chat one button sends and stops
  for (const id of ["run", "race", "forget"]) $(id).setAttribute("aria-disabled", String(!isFree && !(id === "run" && isStop)));
  $("run").textContent = isStop ? "Stop" : isChat() ? "Send" : "Write";
  $("run").type = isStop ? "button" : "submit";  // Enter in a field must not stop
  $("stop").setAttribute("aria-disabled", String(isFree));
  $("replay").setAttribute("aria-disabled", String(!isFree || !state.lanes.spec?.took));
}

/** Run some work of which there is one at a time; the button stops it. */
async function busy(work) {
  if (state.running) return;
  if (!$("form").checkValidity()) $("settings").open = true;  // nobody can mend a field that is not seen
  if (!$("form").reportValidity()) return;
  state.running = new AbortController();
  complain(null);
  enable(false);
  try {
    if (!state.model) await poll();
    await work(state.running.signal);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else {
      say("Failed.");
      complain(error);
    }
  } finally {
    state.running = null;
    enable(true);
    draw();
  }
}

async function write(signal) {
  const text = $("prompt").value;
  const [path, body] = request({ enabled: $("enabled").checked, explain: true }, text);
  const answer = { rounds: [], text: "" };
  const turn = isChat() ? ask(text, answer, showTurn) : null;
  if (turn) $("prompt").value = "";
  show(answer);
  mark(turn);
  try {
    const words = await follow(path, body, signal, answer, turn);
    if (turn) keep(turn, words);
  } catch (error) {
    if (turn) unanswered(turn, error);
    throw error;
  }
}

/** Show an answer as it comes; says in the end how it went. */
async function follow(path, body, signal, answer, turn) {
  say("Waiting for the first token …");
  const began = performance.now();
  let [isFirst, finish, why] = [true, "", ""];
  for await (const chunk of chunks(path, body, signal)) {
    const found = read(chunk);
    answer.text += found.text;
    why = found.why || why;
    finish = found.finish ?? finish;
    for (const round of kept(found)) add(answer, round);
    if (turn && found.text) grow(turn, found.text);
    if (isFirst && answer.rounds.length) {
      isFirst = false;
      say("Writing …");
    }
    drawSoon();
  }
  return finished(answer, performance.now() - began, finish, why);
}

/** Nothing that was typed is lost: it is in the field again, before what was typed since. */
function unanswered(turn, error) {
  const isStopped = error.name === "AbortError";
  if (isStopped && turn.answer.text) {
    keep(turn, "Stopped.");
    return;
  }
  if (turn.answer.text) fail(turn, "Broken off.");
  else {
    drop(turn);
    mark(null);
  }
  $("prompt").value = [turn.text, $("prompt").value].filter(Boolean).join("\n");
}

function finished(answer, took, finish, why) {
  const count = sum(answer.rounds.map((round) => round.emitted.length));
  const rounds = answer.rounds.length;
  const each = rounds ? (count / rounds).toFixed(2) : "0";
  const speed = `${plural(count, "token")} in ${(took / 1e3).toFixed(2)} s, ${((1e3 * count) / took).toFixed(0)} per second`;
  say(`${speed}; ${plural(rounds, "round")}, ${each} tokens per round; ended by ${finish || "nothing"}.`);
  const drafted = answer.rounds.filter((round) => round.tokens.length > 1).length;
  const reason = why ? ` The controller says: ${why}` : "";
  $("reason").textContent = `Last request: drafts in ${drafted} of ${plural(rounds, "round")}.${reason}`;
  return `${speed}${drafted ? `, ${each} tokens per round` : "; no draft was used"}${finish === "length" ? "; cut off by max tokens" : ""}`;
}

function showTurn(turn) {
  if (turn.answer !== state.answer) show(turn.answer);
  mark(turn);
  $("rounds-drawer").open = true;
  $("rounds-drawer").scrollIntoView({ block: "nearest" });
}

function send() {
  if (isChat() && !$("prompt").value.trim()) $("prompt").focus();
  else busy(write);
}

function startRace() {
  const text = $("prompt").value;
  busy(async (signal) => {
    if (isChat() && !text.trim() && !repeated()) throw new Error("write a message first: the race is about it");
    await race((speculative) => request(speculative, text), signal);
  });
}

// -- chat or completion -----------------------------------------------------------------------------------------------

/** What each kind of page keeps while the other one is shown. */
const KEPT = { completion: {}, chat: { prompt: "", tokens: "512" } };
const WORDS = {
  completion: ["Prompt", "Ctrl + Enter writes, Escape stops", ""],
  chat: ["Message", "Enter sends, Shift + Enter starts a line, Escape stops", "Write a message"],
};

function setMode(mode) {
  const before = document.body.dataset.mode;
  document.querySelector(`input[name=mode][value=${mode}]`).checked = true;
  if (before === mode) return;
  for (const id of ["prompt", "tokens"]) {
    if (before === "chat" || mode === "chat") KEPT[before === "chat" ? "chat" : "completion"][id] = $(id).value;
    $(id).value = KEPT[mode][id] ?? $(id).value;
  }
  document.body.dataset.mode = mode;
  const [name, hint, placeholder] = WORDS[mode];
  $("prompt-label").textContent = $("write-title").textContent = name;
  $("keys").textContent = hint;
  $("prompt").placeholder = placeholder;
  for (const id of ["settings", "rounds-drawer", "race-drawer", "engine-drawer"]) $(id).open = mode === "completion";
  enable(!state.running);
}

/** A model that says how a conversation is written is chatted with. */
function open() {
  const { chat_template: isForChats, limits, sampling_defaults: defaults } = state.spec;
  if (isForChats) {
    if (limits.context_length) KEPT.chat.tokens = String(Math.min(512, Math.ceil(limits.context_length / 2)));
    if (defaults?.values.temperature !== undefined) $("temperature").value = defaults.values.temperature;
  }
  setMode(isForChats ? "chat" : "completion");
}

function forget() {
  if (state.running) return;
  reset();
  show({ rounds: [], text: "" });
  complain(null);
  say("A new chat.");
  $("prompt").focus();
}

// -- beginning --------------------------------------------------------------------------------------------------------

function onKey(event) {
  if (event.key !== "Enter" || event.isComposing) return;
  if (event.ctrlKey || event.metaKey || (isChat() && !event.shiftKey)) {
    event.preventDefault();
    send();
  }
}

function begin() {
  $("key").value = sessionStorage.getItem("foretoken-key") ?? "";
  $("key").addEventListener("change", () => sessionStorage.setItem("foretoken-key", $("key").value.trim()));
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("run").addEventListener("click", (event) => {
    if (!state.running || !isChat()) return;
    event.preventDefault();
    if (event.detail < 2) state.running.abort();  // the second half of a double click is not meant
  });
  $("prompt").addEventListener("keydown", onKey);
  document.addEventListener("keydown", (event) => event.key === "Escape" && state.running?.abort());
  $("stop").addEventListener("click", () => state.running?.abort());
  $("race").addEventListener("click", startRace);
  $("replay").addEventListener("click", () => {
    if (state.running || $("replay").getAttribute("aria-disabled") === "true") return;
    $("replay").setAttribute("aria-disabled", "true");
    replay(() => enable(true));
  });
  $("forget").addEventListener("click", forget);
  $("ribbon").addEventListener("keydown", steer);
  $("cost").addEventListener("click", (event) => {
    const stack = event.target.closest("[data-round]");
    if (stack) choose(Number(stack.getAttribute("data-round")));
  });
  for (const radio of document.querySelectorAll("input[name=mode]")) {
    radio.addEventListener("change", () => setMode(state.running ? document.body.dataset.mode : radio.value));
  }
  new ResizeObserver(() => drawSoon()).observe(document.querySelector("main"));
  enable(true);
  draw();
  drawPulse();
  watch(open, () => setMode("completion"));
}

begin();
