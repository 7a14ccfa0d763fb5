"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);

  // -- the table: a click on a heading sorts by it ---------------------------------------------------------------
  const key = (row, column) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
  const compare = (a, b, sign) => {
    const [x, y] = [parseFloat(a), parseFloat(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y); // empty cells always last
    return sign * (x - y);
  };
  const sortBy = (table, heading) => {
    const column = heading.cellIndex;
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    const words = heading.classList.contains("words");
    const sign = down ? -1 : 1;
    rows.sort((a, b) => {
      const [one, other] = [key(a, column), key(b, column)];
      return words ? sign * one.localeCompare(other) : compare(one, other, sign);
    });
    table.tBodies[0].append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    for (const heading of table.tHead.rows[0].cells) {
      heading.querySelector("button").addEventListener("click", () => sortBy(table, heading));
    }
  }

  // -- the trace -------------------------------------------------------------------------------------------------
  if (!data.traces.length) return;
  const LETTER = 7.9, ROW = 34, GAP = 30, LONGEST = 18;
  const space = byId("tree").querySelector("svg").namespaceURI;
  const arm = byId("arm"), prompt = byId("prompt"), slider = byId("round");
  let trace = null, round = 0;

  const visible = (text) => {
    const shown = text === "" ? "∅" : text.replace(/ /g, "·").replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥");
    const letters = [...shown];
    return letters.length > LONGEST ? letters.slice(0, LONGEST - 1).join("") + "…" : shown;
  };
  const breadth = (text) => [...text].reduce((sum, sign) => sum + (sign.codePointAt(0) > 0x1100 ? 1.8 : 1), 0) * LETTER + 14;
  const draw = (name, attributes, text) => {
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const known = (status) => (["root", "accepted", "rejected", "probe", "bonus", "recovered", "plain"].includes(status) ? status : "plain");

  // Nodes of a round, the target's own token behind the last accepted one, with children and depths.
  const nodesOf = (found) => {
    const nodes = found.tokens.map((token, i) => ({
      id: token, text: String(found.texts?.[i] ?? token), parent: found.parents[i], status: known(found.status[i]), children: [],
    }));
    if (found.next) {
      const last = nodes.reduce((best, node, i) => (node.status === "accepted" ? i : best), 0);
      nodes.push({ id: found.next.token, text: String(found.next.text ?? found.next.token), parent: last, status: known(found.next.origin), children: [], own: true });
    }
    nodes.forEach((node, i) => {
      const above = nodes[node.parent];
      node.depth = above ? above.depth + 1 : 0;
      if (above) above.children.push(i);
      node.label = visible(node.text);
      node.kept = node.status === "accepted" || Boolean(node.own);
    });
    for (const node of nodes) node.children.sort((a, b) => nodes[b].kept - nodes[a].kept); // what was accepted lies on top
    return nodes;
  };

  // Depth gives the column; every leaf takes a row, a parent stands in its first child's row.
  const place = (nodes) => {
    const widths = [];
    for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, breadth(node.label));
    const left = [4];
    widths.forEach((width, depth) => { left[depth + 1] = left[depth] + width + GAP; });
    let row = 0;
    const visit = (i) => {
      const node = nodes[i];
      node.row = row;
      node.children.forEach((child, place) => { if (place) row += 1; visit(child); });
    };
    visit(0);
    for (const node of nodes) Object.assign(node, { x: left[node.depth], y: 6 + ROW * node.row, width: breadth(node.label) });
    return { width: left[left.length - 1], height: ROW * (row + 1) + 8 };
  };

  const drawTree = (found) => {
    const nodes = nodesOf(found), size = place(nodes), holder = byId("tree");
    const picture = draw("svg", { width: size.width, height: size.height, role: "img", "aria-label": "token tree of this round" });
    for (const node of nodes) {
      const above = nodes[node.parent];
      if (!above) continue;
      const [x1, y1, x2, y2] = [above.x + above.width, above.y + 12, node.x, node.y + 12];
      const bend = x2 - GAP / 2;
      picture.append(draw("path", { class: node.kept ? "edge kept" : "edge", d: `M${x1},${y1}H${bend - 8}C${bend},${y1} ${bend - 6},${y2} ${x2},${y2}` }));
    }
    for (const node of nodes) {
      const group = draw("g", {});
      group.append(draw("title", {}, `${JSON.stringify(node.text)}, token ${node.id}, ${node.status}, depth ${node.depth}`));
      group.append(draw("rect", { class: `node ${node.status}`, x: node.x, y: node.y, width: node.width, height: 24, rx: node.own ? 12 : 4 }));
      group.append(draw("text", { x: node.x + 7, y: node.y + 16.5 }, node.label));
      picture.append(group);
    }
    holder.replaceChildren(picture);
  };

  // What a round wrote: its accepted tokens from the root down, then the target's own.
  const written = (found) => {
    const kept = found.tokens.map((_, i) => i).filter((i) => found.status[i] === "accepted");
    const pieces = kept.map((i) => ({ text: String(found.texts?.[i] ?? ""), kind: "accepted" }));
    if (found.next) pieces.push({ text: String(found.next.text ?? ""), kind: known(found.next.origin) });
    return pieces;
  };
  const drawText = () => {
    const holder = byId("text"), parts = [];
    const add = (text, kind) => {
      const span = document.createElement("span");
      span.className = kind;
      span.textContent = text;
      parts.push(span);
      return span;
    };
    add(String(trace.prompt ?? ""), "prompt");
    let last = null;
    trace.rounds.slice(0, round + 1).forEach((found, i) => {
      for (const piece of written(found)) last = add(piece.text, i === round ? `${piece.kind} new` : piece.kind);
    });
    holder.replaceChildren(...parts);
    if (last) holder.scrollTop = last.offsetTop - holder.offsetTop - holder.clientHeight / 2;
  };

  const caption = (found) => {
    const count = (status) => found.status.filter((s) => s === status).length;
    const [accepted, rejected, probes] = [count("accepted"), count("rejected"), count("probe")];
    const ms = (value) => (typeof value === "number" ? `${value.toPrecision(3)} ms` : "not timed");
    const traced = trace.rounds.length, more = trace.rounds[traced - 1].more_rounds;
    const all = typeof more === "number" ? `the first ${traced} of ${traced + more}` : traced;
    const words = [`round ${round + 1} of ${all}: ${accepted + rejected} drafted, ${accepted} accepted`];
    if (found.next) words.push(`then one ${known(found.next.origin)} token`);
    if (probes) words.push(`${probes} probes`);
    return `${words.join(", ")}. Draft ${ms(found.draft_ms)}, target ${ms(found.target_ms)}.`;
  };

  const show = (to) => {
    round = Math.min(Math.max(to, 0), trace.rounds.length - 1);
    slider.value = round + 1;
    byId("back").disabled = round === 0;
    byId("on").disabled = round === trace.rounds.length - 1;
    byId("caption").textContent = caption(trace.rounds[round]);
    drawTree(trace.rounds[round]);
    drawText();
  };
  const open = (index) => {
    trace = data.traces[index];
    slider.max = trace.rounds.length;
    show(0);
  };
  const fill = (select, options) => select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  const label = (found) => {
    const start = String(found.prompt ?? "").trim().replace(/\s+/g, " ").slice(0, 40);
    return `${found.category ?? "?"}, ${found.temperature ? `T=${found.temperature}` : "greedy"}: ${start}`;
  };
  const choices = () => data.traces.map((found, i) => [i, found]).filter(([, found]) => String(found.arm) === arm.value);
  // Another arm opens at the same category and prompt where it has one, so that two arms can be compared.
  const chooseArm = () => {
    const before = trace, mine = choices();
    fill(prompt, mine.map(([i, found]) => [i, label(found)]));
    const same = mine.find(([, found]) => before && label(found) === label(before)) ?? mine.find(([, found]) => before && found.category === before.category);
    prompt.value = (same ?? mine[0])[0];
    open(Number(prompt.value));
  };
  fill(arm, [...new Set(data.traces.map((found) => String(found.arm)))].map((name) => [name, name]));
  arm.addEventListener("change", chooseArm);
  prompt.addEventListener("change", () => open(Number(prompt.value)));
  slider.addEventListener("input", () => show(Number(slider.value) - 1));
  byId("back").addEventListener("click", () => show(round - 1));
  byId("on").addEventListener("click", () => show(round + 1));
  byId("viewer").addEventListener("keydown", (event) => {
    if (event.target === slider || event.target.tagName === "SELECT") return; // they have arrow keys of their own
    const to = { ArrowLeft: round - 1, ArrowRight: round + 1, Home: 0, End: trace.rounds.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
  chooseArm();
})();
