// What became of the nodes of a round, and why: from the rule's own tests, as `foretoken show` tells it.

import { visible } from "./parts.js";

const ON_THE_PATH = "on the path that the rule has kept";
const quoted = (round, node) => `“${visible(round.texts[node])}”`;
const rounded = (value) => String(Number(value.toPrecision(2)));
const passed = (test) => test.u < test.chance;

/** The tests of single draft tokens, by node; none for a rule over whole paths. */
function ownTests(round) {
  const tests = round.decides_by === "tests" ? round.tests : [];
  return new Map(tests.filter((test) => test.node !== null).map((test) => [test.node, test]));
}

/** Outcome of every node: root, accepted, rejected, untried or probe. */
export function fates(round) {
  const tests = ownTests(round);
  const chosen = new Map(round.accepted.map((node) => [round.parents[node], node]));
  const through = round.decides_by === "paths" ? ["root", "accepted", "rejected"] : ["root", "accepted"];
  const found = ["root"];
  for (let node = 1; node < round.tokens.length; node += 1) {
    const above = round.parents[node];
    const inTurn = !chosen.has(above) || round.decides_by === "choices" || node < chosen.get(above);
    if (round.accepted.includes(node)) found.push("accepted");
    else if (round.probes.includes(node)) found.push("probe");
    else if (tests.has(node)) found.push(passed(tests.get(node)) ? "untried" : "rejected"); // passed: an equal sibling leads on
    else found.push(!tests.size && inTurn && through.includes(found[above]) ? "rejected" : "untried");
  }
  return found;
}

/** Why it became so, in words. */
export function because(round, node, found = fates(round)) {
  const [tests, fate] = [ownTests(round), found[node]];
  if (fate === "root") return "the last token of the text so far";
  if (fate === "probe") return "scored for the drafter, never a candidate";
  if (fate === "untried") return untried(round, node, found, tests);
  if (tests.has(node)) return tested(round, node, fate, tests.get(node));
  return round.decides_by === "paths" ? together(round, fate) : compared(round, node, fate);
}

function untried(round, node, found, tests) {
  const above = round.parents[node];
  if (tests.has(node)) return "not needed: an equal draft leads further";
  if (!["root", "accepted"].includes(found[above])) return `its parent ${quoted(round, above)} was not accepted`;
  const sibling = round.accepted.find((other) => round.parents[other] === above);
  return sibling === undefined ? "an equal draft was tried" : `its sibling ${quoted(round, sibling)} was accepted`;
}

/** What the rule compared its draw with: p/q where that is the number, by whichever rule. */
function nameOf(round, node, chance) {
  const [p, q] = [round.p[node], round.q[node]];
  const isRatio = Boolean(p !== null && q) && Math.abs(chance - Math.min(1, p / q)) <= 1e-3 * chance;
  return isRatio ? "p/q" : "its chance";
}

function tested(round, node, fate, test) {
  if (fate === "accepted" && !passed(test)) return "its test failed, but the draw from what was left gave it again";
  const name = nameOf(round, node, test.chance);
  if (test.chance >= 1) return `${name} is at least 1`;
  return `u = ${rounded(test.u)} ${passed(test) ? "<" : "≥"} ${name} = ${rounded(test.chance)}`;
}

/** Of a rule that compares drafts with the target's choices. */
function compared(round, node, fate) {
  const subject = round.verifier === "greedy" ? "the target's most likely token" : "the token that the target took";
  if (fate === "accepted") return round.decides_by === "choices" ? `it is ${subject}` : ON_THE_PATH;
  const chosen = round.accepted.find((other) => round.parents[other] === round.parents[node]);
  return `${subject} is ${chosen === undefined ? `“${visible(round.next_text)}”` : quoted(round, chosen)}`;
}

/** Of a rule that decides over whole paths. */
function together(round, fate) {
  const failed = round.tests.filter((test) => !passed(test)).length;
  return fate === "accepted" ? ON_THE_PATH : `no path through it was kept (${failed} test${failed === 1 ? "" : "s"} failed)`;
}
