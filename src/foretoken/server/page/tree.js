// The draft tree of one round: what was guessed, how likely it was, and what became of it.

import { $, code, plural, probability, sum, svg, table, visible } from "./parts.js";
import { state } from "./state.js";
import { because, fates } from "./why.js";

const WORDS = { untried: "not tried" };

const nextFate = (round) => (round.tokens.length < 2 ? "plain" : round.next_is_bonus ? "bonus" : "recovered");

const figures = (one) => `p ${probability(one.p)} q ${probability(one.q)}`;

/** Places of all nodes: a column for each depth, a row for each leaf. */
function placed(round) {
  const last = round.accepted.length ? round.accepted.at(-1) : 0;
  const kinds = fates(round);
  const nodes = round.tokens.map((_, node) => ({ node, above: round.parents[node], kind: kinds[node], text: round.texts[node], why: because(round, node, kinds) }));
  nodes.push({ node: nodes.length, above: last, kind: nextFate(round), text: round.next_text, why: nextWords(round) });
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
  const group = svg("g", { class: `node ${one.kind}`, transform: `translate(${one.x},${one.y})` },
    svg("title", {}, `${visible(one.text)}: ${WORDS[one.kind] ?? one.kind}; ${one.why}`),
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
    $("why").textContent = `“${visible(one.text)}”: ${WORDS[one.kind] ?? one.kind}; ${one.why}.`;
  });
  return group;
}

function nextWords(round) {
  const kind = nextFate(round);
  if (kind === "plain") return "drawn from the target, without drafts";
  return kind === "bonus" ? "the target's next token after a path that was accepted whole" : "the target's token in place of the refused drafts";
}

export function drawTree() {
  const round = state.answer.rounds[state.chosen];
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
    probability(one.q), probability(one.p), WORDS[one.kind] ?? one.kind, one.why,
  ]);
  table("tree-table", label, ["Node", "Token", "Parent", "q", "p", "Outcome", "Why"], rows);
}
