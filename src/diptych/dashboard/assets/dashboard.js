// What the page decides without the server: which runs have which colour, which part is in view.
"use strict";

(() => {
  const COLORS = ["#3b7dd8", "#d9822b", "#2f9e77", "#b5487f", "#8a6fd1", "#a08a1f", "#3a9bb0", "#c75146"];
  const MOST_ROWS = 500;
  const COLUMNS = [
    ["run", "run", (line) => line.run],
    ["state", "state", (line) => line.state],
    ["step", "step", (line) => `${line.step ?? "-"}/${line.num_steps ?? "-"}`],
    ["loss", "loss", (line) => fixed(line.loss)],
    ["heldout", "held-out", (line) => fixed(line.heldout)],
    ["rate", "tokens/s", (line) => line.rate_text ?? ""],
    ["moved_s", "moved", (line) => (line.moved_s == null ? "" : ago(Date.now() / 1000 - line.moved_s))],
    ["where", "where", (line) => line.where],
  ];
  const NUMBERS = new Set(["step", "loss", "heldout", "rate", "moved_s"]);
  const rows = new Map();
  let shown = {lines: [], chosen: [], text: ""};
  let sorted = null;

  function fixed(value) { return value == null ? "" : value.toFixed(4); }

  function ago(seconds) {
    if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 60) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")}` : `${Math.floor(hours / 24)} d`;
  }

  function element(name, properties, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  // A run keeps its colour while it is chosen; a new one gets the first that is free.
  function choose(keys) {
    const before = new Map(shown.chosen.map((each) => [each.key, each.color]));
    const taken = new Set(keys.filter((key) => before.has(key)).map((key) => before.get(key)));
    const next = keys.slice(0, COLORS.length).map((key) => {
      let color = before.get(key);
      if (color === undefined) {
        color = COLORS.findIndex((_, number) => !taken.has(number));
        taken.add(color);
      }
      return {key, color};
    });
    list(shown.lines, next, shown.text);
    dash_clientside.set_props("chosen", {data: next});
  }

  function toggle(key) {
    const keys = shown.chosen.map((each) => each.key);
    choose(keys.includes(key) ? keys.filter((each) => each !== key) : [...keys, key]);
  }

  function makeRow(line) {
    const box = element("input", {type: "checkbox", ariaLabel: `compare ${line.run}`});
    box.addEventListener("click", (event) => { event.stopPropagation(); toggle(line.key); });
    const cells = COLUMNS.map(([name]) => element("td", {className: NUMBERS.has(name) ? "number" : ""}));
    const row = element("tr", {}, element("td", {}, box), ...cells);
    row.dataset.key = line.key;
    row.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey) toggle(line.key); else choose([line.key]);
    });
    return {row, box, cells};
  }

  function fill({row, box, cells}, line, color) {
    COLUMNS.forEach(([name, , form], number) => {
      const text = form(line);
      if (cells[number].textContent !== text) cells[number].textContent = text;
      if (name === "state") cells[number].className = `state-${line.state}`;
    });
    box.checked = color !== undefined;
    row.className = box.checked ? "chosen" : "";
    row.style.boxShadow = box.checked ? `inset 4px 0 ${COLORS[color]}` : "";
  }

  function inOrder(lines) {
    if (!sorted) return lines;
    const {name, sign} = sorted;
    const compare = (one, two) => (one < two ? -sign : one > two ? sign : 0);
    return [...lines].sort((one, two) => {
      if (one[name] == null || two[name] == null) return (one[name] == null) - (two[name] == null);
      return compare(one[name], two[name]);
    });
  }

  function sortBy(name) {
    const sign = NUMBERS.has(name) ? -1 : 1;
    if (sorted?.name !== name) sorted = {name, sign};
    else sorted = sorted.sign === sign ? {name, sign: -sign} : null;
    list(shown.lines, shown.chosen, shown.text);
  }

  function table(place) {
    if (place.firstChild) return place.querySelector("tbody");
    const titles = COLUMNS.map(([name, title]) => {
      const button = element("button", {type: "button", textContent: title});
      button.addEventListener("click", () => sortBy(name));
      const head = element("th", {className: NUMBERS.has(name) ? "number" : ""}, button);
      head.dataset.name = name;
      return head;
    });
    const body = element("tbody", {});
    const head = element("thead", {}, element("tr", {}, element("th", {}), ...titles));
    place.append(element("table", {}, head, body), element("p", {className: "faint"}));
    return body;
  }

  function list(lines, chosen, text) {
    shown = {lines: lines ?? [], chosen: chosen ?? [], text: (text ?? "").toLowerCase()};
    const place = document.getElementById("list");
    const body = table(place);
    const colors = new Map(shown.chosen.map((each) => [each.key, each.color]));
    const found = inOrder(shown.lines).filter((line) =>
      [line.run, line.state, line.where].some((each) => each.toLowerCase().includes(shown.text)));
    const made = found.slice(0, MOST_ROWS).map((line) => {
      if (!rows.has(line.key)) rows.set(line.key, makeRow(line));
      fill(rows.get(line.key), line, colors.get(line.key));
      return rows.get(line.key).row;
    });
    const isSame = made.length === body.children.length && made.every((row, n) => row === body.children[n]);
    if (!isSame) body.replaceChildren(...made);
    const rest = found.length - made.length;
    place.lastChild.textContent = rest > 0 ? `and ${rest} more: find them by name` : "";
    for (const head of place.querySelectorAll("th[data-name]")) {
      const isBy = sorted?.name === head.dataset.name;
      head.ariaSort = isBy ? (sorted.sign > 0 ? "ascending" : "descending") : "none";
    }
    return dash_clientside.no_update;
  }

  // plotly gives dates of UTC without saying so.
  function number(value) {
    return typeof value === "number" ? value : Date.parse(String(value).replace(" ", "T") + "Z");
  }

  function zoom(_relayouts, x, views) {
    const {triggered} = dash_clientside.callback_context;
    const next = {...views};
    for (const each of triggered) {
      if (each.prop_id === "x.value") { next.steps = next.acted = null; continue; }
      const data = each.value;
      if (!data) continue;
      const {axis, figure} = JSON.parse(each.prop_id.replace(/\.relayoutData$/, ""));
      next.acted = figure;
      if (data["xaxis.range[0]"] !== undefined) {
        next[axis] = [number(data["xaxis.range[0]"]), number(data["xaxis.range[1]"])];
      } else if (data["xaxis.autorange"]) {
        next[axis] = null;
      }
    }
    const same = ["steps", "clock"].every((axis) => String(next[axis]) === String(views[axis]));
    return same ? dash_clientside.no_update : next;
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {dashboard: {list, zoom}});
})();
