// The page of a foretoken server.  No library, no build step; styles are set by classes or through the CSSOM only,
// so that it runs under a content security policy of 'self'.

// -- small things -----------------------------------------------------------------------------------------------------

const ORIGINS = ["accepted", "recovered", "bonus", "plain"];
const PHASES = ["draft", "target", "verify", "overhead"];
const $ = (id) => document.getElementById(id);

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
const html = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const sum = (values) => values.reduce((total, value) => total + value, 0);
const percent = (value) => `${(100 * value).toFixed(0)} %`;
const ms = (seconds) => `${(1e3 * seconds).toFixed(1)} ms`;
const probability = (value) => {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 0.001 ? "<.001" : value.toFixed(3).replace(/^0/, "");
};
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** A token so that its blanks can be seen, in one line. */
function visible(text, longest = 60) {
  if (text === "") return "∅";
  const shown = text.replace(/\n/g, "↵").replace(/\t/g, "→").replace(/ /g, "␣");
  return shown.length > longest ? `${shown.slice(0, longest - 1)}…` : shown;
}

/** 95 % interval of a share, by Wilson. */
function wilson(hits, tries) {
  const z = 1.959964;
  const rate = hits / tries;
  const middle = rate + (z * z) / (2 * tries);
  const half = z * Math.sqrt((rate * (1 - rate)) / tries + (z * z) / (4 * tries * tries));
  const whole = 1 + (z * z) / tries;
  return [Math.max(0, (middle - half) / whole), Math.min(1, (middle + half) / whole)];
}

// -- the server -------------------------------------------------------------------------------------------------------

const state = {
  model: null, rounds: [], chosen: -1, drawn: null, text: "", turns: [], running: null, due: 0, pulses: [], lanes: {},
};

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** What a failed answer says, as one sentence. */
async function trouble(response) {
  let said = "";
  try {
    said = (await response.json()).error.message;
  } catch {
    said = response.statusText || "no reason given";
  }
  const hint = response.status === 401 ? " (put it under “API key”)" : "";
  return `${response.status}: ${said}${hint}`;
}

async function answered(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer");
  }
  if (!response.ok) throw new Error(await trouble(response));
  return response;
}

/** Objects of a stream.  One that ends without [DONE] has broken off, and that is an error. */
async function* chunks(path, body, signal) {
  const response = await answered(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream broke off before its end");
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((one) => one.startsWith("data: "));
      if (!line) continue;
      if (line === "data: [DONE]") return;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield data;
    }
  }
}

// -- what is asked ----------------------------------------------------------------------------------------------------

const isChat = () => document.querySelector("input[name=mode]:checked").value === "chat";

/** Path and body of a request, as the form says. */
function request(speculative) {
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
  if (!isChat()) return ["v1/completions", { ...body, prompt: $("prompt").value }];
  const messages = [...state.turns, { role: "user", content: $("prompt").value }];
  return ["v1/chat/completions", { ...body, messages }];
}

/** What a chunk brings, the same for completions and chat. */
function read(chunk) {
  const choice = chunk.choices[0];
  if (!choice) return { text: "", ids: [], origins: [], rounds: [], why: "", usage: chunk.usage, metrics: chunk.metrics };
  const speculative = choice.speculative ?? {};
  return {
    text: choice.text ?? choice.delta?.content ?? "",
    ids: choice.token_ids ?? [],
    origins: choice.origins ?? [],
    rounds: speculative.rounds ?? [],
    why: speculative.why ?? "",
    finish: choice.finish_reason,
  };
}

/** Rounds with the tokens that were kept of each: a limit or a stop may cut the last one short. */
function kept({ ids, origins, rounds, text }) {
  if (!rounds.length && ids.length) {
    const token = { text, id: ids[0], origin: origins[0] ?? "plain" };
    return [{ tokens: [], parents: [], p: [], q: [], texts: [], accepted: [], emitted: [token] }];
  }
  let from = 0;
  return rounds.map((round) => {
    const texts = [...round.accepted.map((node) => round.texts[node]), round.next_text];
    const emitted = texts.slice(0, Math.max(0, ids.length - from)).map((one, index) => ({
      text: one, id: ids[from + index], origin: origins[from + index] ?? "plain",
    }));
    from += emitted.length;
    return { ...round, emitted };
  });
}

// -- running ----------------------------------------------------------------------------------------------------------

function say(text) {
  $("status").textContent = text;
}

function complain(error) {
  const hidden = error === null;
  $("problem").hidden = hidden;
  $("problem").textContent = hidden ? "" : error.message;
}

/** Buttons that cannot be used now say so, but keep the focus, which a disabled button would lose. */
function enable(isFree) {
  for (const id of ["run", "race"]) $(id).setAttribute("aria-disabled", String(!isFree));
  $("stop").setAttribute("aria-disabled", String(isFree));
  $("replay").setAttribute("aria-disabled", String(!isFree || !state.lanes.spec?.took));
}

/** Run some work of which there is one at a time; the button stops it. */
async function busy(work) {
  if (state.running || !$("form").reportValidity()) return;
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
  clear();
  const [path, body] = request({ enabled: $("enabled").checked, explain: true });
  say("Waiting for the first token …");
  const began = performance.now();
  let [first, finish, why] = [0, "", ""];
  for await (const chunk of chunks(path, body, signal)) {
    const found = read(chunk);
    state.text += found.text;
    why = found.why || why;
    finish = found.finish ?? finish;
    for (const round of kept(found)) add(round);
    if (!first && state.rounds.length) {
      first = performance.now() - began;
      say("Writing …");
    }
    drawSoon();
  }
  finished(performance.now() - began, finish, why);
  if (isChat()) {
    state.turns = [...body.messages, { role: "assistant", content: state.text }];
    $("forget").hidden = false;
  }
}

function finished(took, finish, why) {
  const count = sum(state.rounds.map((round) => round.emitted.length));
  const rounds = state.rounds.length;
  const each = rounds ? (count / rounds).toFixed(2) : "0";
  say(`${plural(count, "token")} in ${(took / 1e3).toFixed(2)} s, ${((1e3 * count) / took).toFixed(0)} per second; ` +
    `${plural(rounds, "round")}, ${each} tokens per round; ended by ${finish || "nothing"}.`);
  const drafted = state.rounds.filter((round) => round.tokens.length > 1).length;
  const reason = why ? ` The controller says: ${why}` : "";
  $("reason").textContent = `Last request: drafts in ${drafted} of ${plural(rounds, "round")}.${reason}`;
}

function clear() {
  state.rounds = [];
  state.chosen = -1;
  state.text = "";
  $("ribbon").replaceChildren();
  $("ribbon").removeAttribute("aria-activedescendant");
  $("empty").hidden = true;
  $("turns").replaceChildren(
    ...(isChat() ? state.turns : []).map((turn) => html("p", {}, `${turn.role}: ${turn.content}`)),
  );
  draw();
}

// -- the ribbon -------------------------------------------------------------------------------------------------------

function add(round) {
  const index = state.rounds.push(round) - 1;
  const box = $("answer");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  const option = html("span", {
    class: "round", role: "option", id: `round-${index}`, "aria-selected": "false", "aria-label": spoken(round, index),
  }, ...round.emitted.flatMap(shownToken));
  option.addEventListener("click", () => choose(index));
  option.addEventListener("mouseenter", () => peek(index));
  option.addEventListener("mouseleave", () => peek(state.chosen));
  $("ribbon").append(option);
  for (const origin of ORIGINS) $(`n-${origin}`).textContent = counted(origin);
  if (atEnd) box.scrollTop = box.scrollHeight;
}

const counted = (origin) =>
  sum(state.rounds.map((round) => round.emitted.filter((token) => token.origin === origin).length));

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
  const round = state.rounds[index];
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

function choose(index) {
  if (!state.rounds[index]) return;
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

function steer(event) {
  const step = STEPS[event.key];
  if (step === undefined || !state.rounds.length) return;
  event.preventDefault();
  choose(Math.min(state.rounds.length - 1, Math.max(0, state.chosen + step)));
}

// -- the tree ---------------------------------------------------------------------------------------------------------

const WORDS = { unreached: "never reached" };

/** The accepted sibling, if it was tried before this node. */
const siblingBefore = (round, node) =>
  round.accepted.find((other) => other < node && round.parents[other] === round.parents[node]);

/** What became of a node: root, accepted, rejected, or never reached. */
function fate(round, node) {
  if (node === 0) return "root";
  if (round.accepted.includes(node)) return "accepted";
  const above = round.parents[node];
  if (above !== 0 && !round.accepted.includes(above)) return "unreached";
  return round.q[node] !== null && siblingBefore(round, node) !== undefined ? "unreached" : "rejected";
}

const nextFate = (round) => (round.tokens.length < 2 ? "plain" : round.next_is_bonus ? "bonus" : "recovered");

/** Why it became so, in words. */
function because(round, node) {
  const [p, q, above] = [round.p[node], round.q[node], round.parents[node]];
  const kind = fate(round, node);
  const isPoint = q === null || q === undefined;
  if (kind === "root") return "the last token of the text so far";
  if (kind === "unreached") {
    const sibling = isPoint ? undefined : siblingBefore(round, node);
    if (sibling !== undefined) return `“${visible(round.texts[sibling])}” was accepted before it was tried`;
    return `its parent “${visible(round.texts[above])}” was not accepted`;
  }
  const ratio = isPoint || !q || p === null ? "" : `p/q = ${(p / q).toFixed(2)}`;
  if (kind === "accepted") {
    if (isPoint) return `it is the target's own choice (p = ${probability(p)})`;
    return p >= q ? `${ratio} ≥ 1: always accepted` : `${ratio}: accepted with that probability, and the draw fell so`;
  }
  const chosen = round.accepted.find((other) => round.parents[other] === above);
  const wanted = visible(chosen === undefined ? round.next_text : round.texts[chosen]);
  if (isPoint) return `the target chose “${wanted}” here (p of this one: ${probability(p)})`;
  return `${ratio} was its chance${isFirst(round, node) ? "" : ", or less after its siblings were tried"}, and the draw refused it`;
}

const isFirst = (round, node) => round.parents.indexOf(round.parents[node]) === node;

const figures = (one) => `p ${probability(one.p)} q ${probability(one.q)}`;

/** Places of all nodes: a column for each depth, a row for each leaf. */
function placed(round) {
  const last = round.accepted.length ? round.accepted.at(-1) : 0;
  const nodes = round.tokens.map((_, node) => ({ node, above: round.parents[node], kind: fate(round, node), text: round.texts[node] }));
  nodes.push({ node: nodes.length, above: last, kind: nextFate(round), text: round.next_text });
  for (const one of nodes) {
    one.depth = one.above < 0 ? 0 : nodes[one.above].depth + 1;
    one.p = round.p[one.node] ?? null;
    one.q = round.q[one.node] ?? null;
    one.r = one.q === null ? 6 : 3 + 9 * Math.sqrt(one.q);
    one.label = visible(one.text, 16);
    one.width = Math.max(7.4 * one.label.length, one.p === null ? 0 : 6 * figures(one).length);
  }
  const widths = [];
  for (const one of nodes) widths[one.depth] = Math.max(widths[one.depth] ?? 0, one.width);
  const lefts = widths.map((_, depth) => 24 + sum(widths.slice(0, depth)) + 76 * depth);
  let row = 0;
  const below = (node) => nodes.filter((one) => one.above === node);
  const place = (one) => {
    const children = below(one.node);
    children.forEach(place);
    one.y = children.length ? (children[0].y + children.at(-1).y) / 2 : 30 + 38 * row++;
    one.x = lefts[one.depth];
  };
  place(nodes[0]);
  return { nodes, width: lefts.at(-1) + widths.at(-1) + 40, height: 30 + 38 * row };
}

function edge(one, above) {
  const from = above.x + above.r + 9 + above.width + 8;
  const to = one.x - one.r - 5;
  const middle = (from + to) / 2;
  const kind = one.kind === "accepted" ? "accepted" : ["bonus", "recovered", "plain"].includes(one.kind) ? "next" : "";
  return svg("path", { class: `edge ${kind}`, d: `M${from},${above.y}C${middle},${above.y} ${middle},${one.y} ${to},${one.y}` });
}

function drawnNode(round, one) {
  const around = 2 * Math.PI * (one.r + 3.5);
  const isDraft = one.node > 0 && one.node < round.tokens.length;
  const why = isDraft || one.node === 0 ? because(round, one.node) : nextWords(round);
  const group = svg("g", { class: `node ${one.kind}`, transform: `translate(${one.x},${one.y})` },
    svg("title", {}, `${visible(one.text)}: ${WORDS[one.kind] ?? one.kind}; ${why}`),
    svg("circle", { class: "disc", r: one.r }),
    ...(isDraft ? [
      svg("circle", { class: "halo", r: one.r + 3.5 }),
      svg("circle", { class: "ring", r: one.r + 3.5, transform: "rotate(-90)", "stroke-dasharray": `${(one.p ?? 0) * around} ${around}` }),
    ] : []),
    svg("text", { class: "token", x: one.r + 9, y: isDraft ? 0 : 4 }, one.label),
    ...(isDraft ? [svg("text", { class: "axis", x: one.r + 9, y: 13 }, figures(one))] : []),
    ...(one.kind === "rejected" ? [svg("path", { class: "cross", d: "M-4,-4L4,4M-4,4L4,-4" })] : []),
  );
  group.addEventListener("click", () => {
    document.querySelector(".node.chosen")?.classList.remove("chosen");
    group.classList.add("chosen");
    $("why").textContent = `“${visible(one.text)}”: ${WORDS[one.kind] ?? one.kind}; ${why}.`;
  });
  return group;
}

function nextWords(round) {
  const kind = nextFate(round);
  if (kind === "plain") return "drawn from the target, without drafts";
  return kind === "bonus" ? "the target's next token after a path that was accepted whole" : "the target's token in place of the refused drafts";
}

function drawTree() {
  const round = state.rounds[state.chosen];
  if (state.drawn === round) return;
  state.drawn = round;
  $("why").textContent = "\u00a0";
  if (!round || !round.tokens.length) {
    $("tree").replaceChildren();
    $("tree-which").textContent = "";
    $("tree-table").replaceChildren();
    return;
  }
  const { nodes, width, height } = placed(round);
  const drafts = nodes.length - 2;
  const isPoint = drafts > 0 && round.q.every((value) => value === null);
  const note = isPoint ? "; its guesses are single tokens, so they have no q" : "";
  $("tree-which").textContent = `of round ${state.chosen + 1}` + (drafts ? `, by ${round.drafter}${note}` : ": nothing was drafted");
  const label = `Round ${state.chosen + 1}: ${plural(drafts, "draft")}, ${round.accepted.length} accepted`;
  $("tree").replaceChildren(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...nodes.slice(1).map((one) => edge(one, nodes[one.above])),
    ...nodes.map((one) => drawnNode(round, one))));
  const rows = nodes.map((one) => [
    one.node < round.tokens.length ? one.node : "next", code(one.text), one.above < 0 ? "" : one.above,
    probability(one.q), probability(one.p), WORDS[one.kind] ?? one.kind, one.node < round.tokens.length ? because(round, one.node) : nextWords(round),
  ]);
  table("tree-table", label, ["Node", "Token", "Parent", "q", "p", "Outcome", "Why"], rows);
}

// -- tables and charts ------------------------------------------------------------------------------------------------

const code = (text) => html("code", {}, visible(text));

function table(id, caption, names, rows) {
  const isNumber = (value) => typeof value === "number" || (typeof value === "string" && /^[<.\d–-]/.test(value));
  const kinds = names.map((_, column) => (rows.length && isNumber(rows[0][column]) ? "num" : ""));
  $(id).replaceChildren(html("table", {}, html("caption", { class: "sr" }, caption),
    html("thead", {}, html("tr", {}, ...names.map((name, column) => html("th", { scope: "col", class: kinds[column] }, name)))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((value, column) => html("td", { class: kinds[column] }, value)))))));
}

/** An empty chart of the size of its box, with lines at some heights. */
function frame(id, label, top, ticks, write) {
  const box = $(id);
  const [width, height, left, bottom] = [box.clientWidth, box.clientHeight, 44, 34];
  const y = (value) => height - bottom - (value / top) * (height - bottom - 10);
  const figure = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const tick of ticks) {
    figure.append(svg("line", { class: tick ? "grid" : "base", x1: left, x2: width, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "axis", x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, write(tick)));
  }
  box.replaceChildren(figure);
  return { figure, width, height, left, y, room: width - left };
}

/** Round values from zero up to at least the top. */
function ticksTo(top, most = 4) {
  const raw = top / most;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((one) => one >= raw - 1e-12);
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 }, (_, index) => index * step);
}

const number = (value) => String(Number(value.toPrecision(3)));

/** For each depth, how many rounds had a draft there behind an accepted path, and how many accepted one. */
function positions() {
  const found = [];
  for (const round of state.rounds) {
    const path = [0, ...round.accepted];
    path.forEach((node, depth) => {
      if (!round.parents.includes(node)) return;
      found[depth] ??= { tries: 0, hits: 0 };
      found[depth].tries += 1;
      if (depth < round.accepted.length) found[depth].hits += 1;
    });
  }
  return found.map(({ tries, hits }, index) => {
    const [low, high] = wilson(hits, tries);
    return { place: index + 1, tries, hits, rate: hits / tries, low, high };
  });
}

function drawPositions() {
  const found = positions();
  const rows = found.map((one) => [one.place, one.tries, one.hits, percent(one.rate), `${percent(one.low)} to ${percent(one.high)}`]);
  table("position-table", "Acceptance by position", ["Position", "Tried", "Accepted", "Share", "95 % interval"], rows);
  const label = found.map((one) => `position ${one.place}: ${percent(one.rate)}`).join(", ") || "no drafts yet";
  const { figure, left, y, room, height } = frame("position", `Acceptance by position: ${label}`, 1, [0, 0.25, 0.5, 0.75, 1], percent);
  const step = Math.min(72, room / Math.max(1, found.length));
  found.forEach((one, index) => {
    const middle = left + step * (index + 0.5);
    const wide = Math.min(34, step * 0.6);
    figure.append(
      svg("rect", { class: "bar", x: middle - wide / 2, width: wide, y: y(one.rate), height: y(0) - y(one.rate) }),
      svg("path", { class: "whisker", d: `M${middle},${y(one.low)}V${y(one.high)}M${middle - 5},${y(one.low)}h10M${middle - 5},${y(one.high)}h10` }),
      svg("text", { class: "axis", x: middle, y: height - 19, "text-anchor": "middle" }, one.place),
      svg("text", { class: "axis", x: middle, y: height - 5, "text-anchor": "middle" }, `${one.hits}/${one.tries}`));
  });
}

function drawHistogram() {
  const counts = [];
  for (const round of state.rounds) counts[round.emitted.length] = (counts[round.emitted.length] ?? 0) + 1;
  const bars = Array.from({ length: Math.max(0, counts.length - 1) }, (_, index) => ({ size: index + 1, count: counts[index + 1] ?? 0 }));
  table("histogram-table", "Tokens per round", ["Tokens", "Rounds"], bars.map((one) => [one.size, one.count]));
  const total = sum(bars.map((one) => one.size * one.count));
  const rounds = sum(bars.map((one) => one.count));
  const mean = rounds ? `${(total / rounds).toFixed(2)} tokens for each call of the target, on average.` : "How many tokens each call of the target has given.";
  $("histogram-mean").textContent = mean;
  const ticks = ticksTo(Math.max(4, ...bars.map((one) => one.count)));
  const label = bars.map((one) => `${plural(one.size, "token")}: ${plural(one.count, "round")}`).join(", ") || "no rounds yet";
  const { figure, left, y, room, height } = frame("histogram", label, ticks.at(-1), ticks, number);
  const step = Math.min(72, room / Math.max(1, bars.length));
  bars.forEach((one, index) => {
    const middle = left + step * (index + 0.5);
    const wide = Math.min(34, step * 0.6);
    figure.append(
      svg("rect", { class: "bar count", x: middle - wide / 2, width: wide, y: y(one.count), height: y(0) - y(one.count) }),
      svg("text", { class: "axis", x: middle, y: height - 19, "text-anchor": "middle" }, one.size),
      svg("text", { class: "axis", x: middle, y: height - 5, "text-anchor": "middle" }, one.count ? `×${one.count}` : ""));
  });
}

function drawCost() {
  const rounds = state.rounds.filter((round) => round.target_s !== undefined);
  const costs = rounds.map((round) => PHASES.map((phase) => Math.max(0, round[`${phase}_s`])));
  const totals = PHASES.map((_, phase) => sum(costs.map((one) => one[phase])));
  const whole = sum(totals);
  const words = PHASES.map((phase, index) => `${phase} ${percent(totals[index] / whole)}`).join(", ");
  $("cost-sum").textContent = whole
    ? `${ms(whole / costs.length)} a round: ${words}.`
    : "Milliseconds of the whole batch, round after round.";
  const rows = costs.map((one, index) => [index + 1, ...one.map((part) => (1e3 * part).toFixed(2)), (1e3 * sum(one)).toFixed(2)]);
  table("cost-table", "Cost of each round in milliseconds", ["Round", ...PHASES.map((phase) => `${phase}, ms`), "Sum, ms"], rows);
  const ticks = ticksTo(Math.max(1, ...costs.map((one) => 1e3 * sum(one))));
  const { figure, left, y, room, height } = frame("cost", whole ? `Cost of rounds: ${words}` : "no rounds yet", ticks.at(-1), ticks, (value) => `${number(value)} ms`);
  const step = Math.min(26, room / Math.max(1, costs.length));
  costs.forEach((parts, index) => drawStack(figure, parts, left + step * (index + 0.14), step * 0.72, y, index));
  if (costs.length) {
    figure.append(svg("text", { class: "axis", x: left, y: height - 14 }, "round 1"),
      svg("text", { class: "axis", x: Math.min(left + step * costs.length, left + room), y: height - 14, "text-anchor": "end" }, costs.length > 4 ? costs.length : ""));
  }
}

function drawStack(figure, parts, x, width, y, index) {
  const group = svg("g", {}, svg("title", {}, `Round ${index + 1}: ${parts.map((part, phase) => `${PHASES[phase]} ${ms(part)}`).join(", ")}`));
  let below = 0;
  parts.forEach((part, phase) => {
    const above = below + 1e3 * part;
    group.append(svg("rect", { class: PHASES[phase], x, width, y: y(above), height: y(below) - y(above) }));
    below = above;
  });
  if (index === state.chosen) group.append(svg("rect", { class: "mark", x: x - 2, width: width + 4, y: y(below) - 2, height: y(0) - y(below) + 4 }));
  group.addEventListener("click", () => choose(index));
  figure.append(group);
}

function draw() {
  state.due = 0;
  if (state.chosen < 0 && state.rounds.length) choose(0);
  else drawTree();
  for (const origin of ORIGINS) $(`n-${origin}`).textContent = counted(origin);
  drawPositions();
  drawHistogram();
  drawCost();
}

function drawSoon() {
  state.due ||= setTimeout(draw, 200);
}

// -- the race ---------------------------------------------------------------------------------------------------------

/** One lane: tokens and text as they come, with their times. */
async function lane(name, enabled, salt, signal) {
  const [path, body] = request({ enabled });
  const found = { ids: [], steps: [], took: 0, most: body.max_tokens };
  state.lanes[name] = found;
  const began = performance.now();
  let text = "";
  for await (const chunk of chunks(path, { ...body, seed: body.seed ?? 0, cache_salt: salt }, signal)) {
    const one = read(chunk);
    text += one.text;
    found.ids.push(...one.ids);
    found.steps.push({ at: performance.now() - began, text, count: found.ids.length });
    show(name, found.steps.at(-1), found.most);
  }
  found.took = performance.now() - began;
  found.steps.push({ at: found.took, text, count: found.ids.length });
  show(name, found.steps.at(-1), found.most);
}

function show(name, step, most) {
  $(`${name}-text`).textContent = step.text;
  $(`${name}-text`).scrollTop = $(`${name}-text`).scrollHeight;
  $(`${name}-bar`).style.width = `${100 * Math.min(1, step.count / most)}%`;
  $(`${name}-time`).textContent = `${plural(step.count, "token")}, ${(step.at / 1e3).toFixed(2)} s`;
}

function judge(plain, spec) {
  const longest = Math.max(plain.ids.length, spec.ids.length);
  const differs = Array.from({ length: longest }, (_, index) => plain.ids[index] !== spec.ids[index]).indexOf(true);
  const same = differs < 0 ? longest : differs;
  const ratio = plain.took / spec.took;
  const speed = ratio >= 1 ? `${ratio.toFixed(2)} times as fast` : `slower: ${ratio.toFixed(2)} of plain's speed`;
  const equal = differs < 0 ? `identical: yes, ${same} of ${longest} tokens` : `identical: no, they differ from token ${differs + 1} of ${longest}`;
  $("verdict").textContent = `${equal}; speculative was ${speed}.`;
  $("verdict").className = differs < 0 ? "same" : "differ";
}

async function race(signal) {
  const salt = `race-${Date.now()}-`;
  state.lanes = {};
  $("verdict").className = "";
  $("verdict").textContent = "Plain runs first …";
  for (const name of ["plain", "spec"]) show(name, { text: "", count: 0, at: 0 }, 1);
  $("race-title").scrollIntoView({ block: "start" });
  say($("seed").value === "" ? "Racing with seed 0: without a seed two texts may differ." : "Racing …");
  try {
    await lane("plain", false, `${salt}plain`, signal);
    $("verdict").textContent = "Speculative runs …";
    await lane("spec", true, `${salt}spec`, signal);
  } catch (error) {
    $("verdict").textContent = error.name === "AbortError" ? "Stopped." : "Not finished.";
    throw error;
  }
  judge(state.lanes.plain, state.lanes.spec);
  say(`Race: ${$("verdict").textContent}`);
}

/** Both lanes again at their recorded pace, stretched to be seen; at once where motion is not wanted. */
function replay() {
  if (state.running || $("replay").getAttribute("aria-disabled") === "true") return;
  const { plain, spec } = state.lanes;
  $("replay").setAttribute("aria-disabled", "true");
  const longest = Math.max(plain.took, spec.took);
  const stretch = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : Math.max(1, 3000 / longest);
  const began = performance.now();
  const tick = () => {
    if (state.running) return;
    const now = stretch ? (performance.now() - began) / stretch : longest;
    for (const [name, found] of Object.entries({ plain, spec })) {
      const step = found.steps.findLast((one) => one.at <= now) ?? { text: "", count: 0 };
      show(name, { ...step, at: Math.min(now, found.took) }, found.most);
    }
    if (now < longest) requestAnimationFrame(tick);
    else enable(true);
  };
  tick();
}

// -- the engine, every second -----------------------------------------------------------------------------------------

function metric(text, name) {
  const pattern = new RegExp(`^foretoken:${name}(?:\\{[^}]*\\})? (\\S+)$`, "gm");
  return sum([...text.matchAll(pattern)].map((found) => Number(found[1])));
}

async function poll() {
  const options = { headers: headers(), signal: AbortSignal.timeout(5000) };
  const spec = await (await answered("v1/spec", options)).json();
  const counters = await (await answered("metrics", options)).text();
  state.model = spec.model;
  const pulse = {
    at: performance.now(), rounds: spec.state.rounds, running: spec.state.running, waiting: spec.state.waiting,
    tokens: metric(counters, "generation_tokens_total"),
  };
  state.pulses = [...state.pulses, pulse].filter((one) => pulse.at - one.at < 61e3);
  showEngine(spec, pulse);
}

/** Growth of a counter per second over the last so many seconds. */
function rate(name, seconds, end = state.pulses.length - 1) {
  const last = state.pulses[end];
  const first = state.pulses.find((one) => last.at - one.at <= 1e3 * seconds);
  return last === first ? 0 : (1e3 * (last[name] - first[name])) / (last.at - first.at);
}

function showEngine(spec, pulse) {
  const { state: engine } = spec;
  $("model").textContent = spec.drafter ? `${spec.model} · drafter ${spec.drafter}` : `${spec.model} · no drafter`;
  $("live-state").textContent = engine.dead ? "stopped" : engine.draining ? "shutting down" : engine.running ? "busy" : "idle";
  $("live-running").textContent = pulse.running;
  $("live-waiting").textContent = pulse.waiting;
  $("live-rounds").textContent = rate("rounds", 2.5).toFixed(0);
  $("live-tokens").textContent = rate("tokens", 10.5).toFixed(0);
  const facts = {
    "Drafter": spec.drafter ?? "none",
    "Verifier": spec.verifier,
    "Controller": spec.controller ?? "none",
    "Exact": spec.lossless ? "yes: the target's own distribution" : "no: lossy rules are allowed",
    "Keys and values": bytes(engine.kv_bytes) + (engine.kv_budget_bytes ? ` of ${bytes(engine.kv_budget_bytes)}` : ""),
    "Places": `${pulse.running} of ${spec.limits.max_running} running, ${pulse.waiting} of ${spec.limits.max_queued} waiting`,
    "Tokens/s": `${rate("tokens", 10.5).toFixed(1)} in finished requests, last 10 s`,
    ...flat(engine.controller ?? {}),
  };
  $("engine").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, String(value))]));
  drawPulse();
}

function bytes(count) {
  const power = Math.min(3, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${number(count / 1024 ** power)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

/** Nested values as names and texts. */
function flat(value, name = "") {
  if (value === null || typeof value !== "object") {
    return { [name.replaceAll("_", " ")]: typeof value === "number" ? number(value) : String(value) };
  }
  if (Array.isArray(value) && value.every((one) => one === null || typeof one !== "object")) {
    return { [name.replaceAll("_", " ")]: value.map((one) => (typeof one === "number" ? number(one) : one)).join(", ") };
  }
  return Object.assign({}, ...Object.entries(value).map(([key, one]) => flat(one, name ? `${name} ${key}` : key)));
}

function drawPulse() {
  const rates = state.pulses.map((_, index) => rate("rounds", 2.5, index));
  const ticks = ticksTo(Math.max(10, ...rates), 3);
  const last = state.pulses.at(-1);
  const label = last ? `${rates.at(-1).toFixed(0)} rounds per second, ${last.running} running, ${last.waiting} waiting` : "nothing yet";
  const { figure, width, y, room, height, left } = frame("pulse", label, ticks.at(-1), ticks, number);
  const line = (values) => values.map((value, index) => {
    const x = width - 2 - ((last.at - state.pulses[index].at) / 60e3) * (room - 4);
    return `${index ? "L" : "M"}${x.toFixed(1)},${y(value).toFixed(1)}`;
  }).join("");
  if (last) {
    const kinds = [["rounds/s", "", rates], ["running", "running", state.pulses.map((one) => one.running)], ["waiting", "waiting", state.pulses.map((one) => one.waiting)]];
    kinds.forEach(([name, kind, values], index) => figure.append(
      svg("path", { class: `pulse ${kind}`, d: line(values) }),
      svg("path", { class: `pulse ${kind}`, d: `M${left + 92 * index},${height - 9}h22` }),
      svg("text", { class: "axis", x: left + 92 * index + 27, y: height - 5 }, name)));
  }
}

async function watch() {
  if (document.visibilityState === "visible") {
    try {
      await poll();
    } catch (error) {
      $("live-state").textContent = error.message.startsWith("401") ? "needs an API key" : error.name === "TimeoutError" ? "no answer" : error.message;
    }
  }
  setTimeout(watch, 1000);
}

// -- beginning --------------------------------------------------------------------------------------------------------

function forget() {
  state.turns = [];
  $("turns").replaceChildren();
  $("forget").hidden = true;
  say("A new conversation.");
  $("prompt").focus();
}

function begin() {
  $("key").value = sessionStorage.getItem("foretoken-key") ?? "";
  $("key").addEventListener("change", () => sessionStorage.setItem("foretoken-key", $("key").value.trim()));
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    busy(write);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      busy(write);
    }
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && state.running?.abort());
  $("stop").addEventListener("click", () => state.running?.abort());
  $("race").addEventListener("click", () => busy(race));
  $("replay").addEventListener("click", replay);
  $("forget").addEventListener("click", forget);
  $("ribbon").addEventListener("keydown", steer);
  new ResizeObserver(() => drawSoon()).observe(document.querySelector("main"));
  enable(true);
  draw();
  drawPulse();
  watch();
}

begin();
