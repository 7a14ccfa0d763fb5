// Charts of the rounds of an answer, and of the engine in the last minute.

import { $, ms, number, percent, PHASES, plural, sum, svg, table } from "./parts.js";
import { rate, state } from "./state.js";
import { wilson } from "./statistics.js";

/** An empty chart of the size of its box, with lines at some heights. */
function frame(id, label, top, ticks, write) {
  const box = $(id);
  const [width, height, left, bottom] = [box.clientWidth, Math.max(60, box.clientHeight), 44, 34];
  const y = (value) => height - bottom - (value / top) * (height - bottom - 10);
  const figure = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const tick of ticks) {
    figure.append(svg("line", { class: tick ? "grid" : "base", x1: left, x2: width, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "axis", x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, write(tick)));
  }
  box.replaceChildren(...(width > left ? [figure] : []));  // nothing in a drawer that is closed
  return { figure, width, height, left, y, room: Math.max(0, width - left) };
}

/** Round values from zero up to at least the top. */
function ticksTo(top, most = 4) {
  const raw = top / most;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((one) => one >= raw - 1e-12);
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 }, (_, index) => index * step);
}

/** For each depth, how many rounds had a draft there behind an accepted path, and how many accepted one. */
function positions() {
  const found = [];
  for (const round of state.answer.rounds) {
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

export function drawPositions() {
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

export function drawHistogram() {
  const counts = [];
  for (const round of state.answer.rounds) counts[round.emitted.length] = (counts[round.emitted.length] ?? 0) + 1;
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

export function drawCost() {
  const rounds = state.answer.rounds.filter((round) => round.target_s !== undefined);
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
  const group = svg("g", { "data-round": index }, svg("title", {}, `Round ${index + 1}: ${parts.map((part, phase) => `${PHASES[phase]} ${ms(part)}`).join(", ")}`));
  let below = 0;
  parts.forEach((part, phase) => {
    const above = below + 1e3 * part;
    group.append(svg("rect", { class: PHASES[phase], x, width, y: y(above), height: y(below) - y(above) }));
    below = above;
  });
  if (index === state.chosen) group.append(svg("rect", { class: "mark", x: x - 2, width: width + 4, y: y(below) - 2, height: y(0) - y(below) + 4 }));
  figure.append(group);
}

export function drawPulse() {
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
