"use strict";
// The figures have no colours for text and grid; these are taken from the page. Each figure is drawn when it is about to become visible.
const figures = JSON.parse(document.getElementById("figures").textContent);
const drawn = new Set();
const axisNames = /^[xy]axis\d*$/;

function themed(layout) {
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), tickcolor: colour("--line") };
  const result = { ...layout, autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("--soft") },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") } } };
  // On touch screens, a finger that moves over a chart scrolls the page.
  if (window.matchMedia("(pointer: coarse)").matches) result.dragmode = false;
  for (const name of Object.keys(layout).filter(name => axisNames.test(name)))
    result[name] = { ...layout[name], ...axis, ...(name[0] === "x" && { showline: true }) };
  return result;
}

function draw(id) {
  drawn.add(id);
  Plotly.react(id, figures[id].data, themed(figures[id].layout), { responsive: true, displayModeBar: false });
}

const near = new IntersectionObserver(entries => {
  for (const entry of entries.filter(entry => entry.isIntersecting)) {
    near.unobserve(entry.target);
    draw(entry.target.id);
  }
}, { rootMargin: "300px" });
for (const id of Object.keys(figures)) near.observe(document.getElementById(id));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
// The page of a run in progress loads itself again, which keeps the place, but not while its reader searches or has opened something.
const refresh = Number(document.body.dataset.refresh);
const isRead = () => document.hidden || document.querySelector("details[open], [aria-expanded=true]")
  || [...document.querySelectorAll("#filters input, #filters select")].some(field => field.type === "select-one" ? field.selectedIndex > 0 : field.value);
if (refresh) setInterval(() => { if (!isRead()) location.reload(); }, 1000 * refresh);
window.addEventListener("beforeprint", () => Object.keys(figures).forEach(draw));

// Searches and filters the recorded samples. Text of the run enters the page only as text nodes.
const GROUPS_AT_A_TIME = 5, RESPONSES_AT_FIRST = 3;
// A long text shows its beginning and more of its end, where the answer is.
const HEAD = { characters: 160, lines: 4 }, TAIL = { characters: 340, lines: 8 };
const form = document.getElementById("filters");
const groups = JSON.parse(document.getElementById("sample-groups").textContent);
const rewards = groups.flatMap(group => group.responses.map(response => response.reward)).filter(reward => reward !== null);
const lowest = Math.min(0, ...rewards), highest = Math.max(1, ...rewards);
let found = [], asked = "", visible = 0;

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function fill(name, first, values, label = value => value) {
  const select = form.elements[name];
  select.append(new Option(first, ""), ...values.map(value => new Option(label(value), value)));
  if (values.length < 2) select.closest("label").hidden = true;
}

function unique(values) { return [...new Set(values)]; }

function written(value) {
  const size = Math.abs(value);
  if (value === 0 || (size >= 0.001 && size < 1000)) return String(Number(value.toFixed(3)));
  return size >= 1000 && size < 1e9 ? Math.round(value).toLocaleString("en") : value.toExponential(2);
}

// The text, with matches of the search marked.
function marked(text) {
  const parts = document.createDocumentFragment(), low = text.toLowerCase();
  if (!asked || low.length !== text.length) { parts.append(text); return parts; }
  let from = 0;
  for (let at = low.indexOf(asked); at >= 0; at = low.indexOf(asked, from)) {
    parts.append(text.slice(from, at), element("mark", "", text.slice(at, at + asked.length)));
    from = at + asked.length;
  }
  parts.append(text.slice(from));
  return parts;
}

function cut(text) {
  const lines = text.split("\n");
  if (text.length <= HEAD.characters + TAIL.characters && lines.length <= HEAD.lines + TAIL.lines) return text;
  const head = lines.slice(0, HEAD.lines).join("\n").slice(0, HEAD.characters);
  const tail = lines.slice(-TAIL.lines).join("\n").slice(-TAIL.characters);
  return head.length + tail.length < text.length ? `${head}\n[…]\n${tail}` : text;
}

function textBox(text, what) {
  const box = element("pre", "box"), part = cut(text);
  if (part === text) { box.append(marked(text)); return box; }
  const button = element("button", "plain");
  button.type = "button";
  const show = whole => {
    box.replaceChildren(marked(whole ? text : part));
    button.textContent = whole ? "Show less" : `Show all ${text.length.toLocaleString("en")} characters`;
    button.append(element("span", "hidden", ` of the ${what}`));
    button.setAttribute("aria-expanded", whole);
  };
  button.addEventListener("click", () => show(button.getAttribute("aria-expanded") !== "true"));
  show(asked !== "" && text.toLowerCase().includes(asked) && !part.toLowerCase().includes(asked));
  return element("div", "", box, button);
}

function chip(reward) {
  const made = element("span", "chip", element("span", "hidden", "reward "), reward === null ? "no reward" : written(reward));
  const hue = 8 + 140 * (reward - lowest) / (highest - lowest);  // from red through amber to green
  made.style.background = reward === null ? "#5f6774" : `hsl(${hue.toFixed(0)} 60% 28%)`;
  return made;
}

function responseCard(response) {
  const facts = element("div", "", chip(response.reward), element("p", "soft small", `${response.tokens.toLocaleString("en")} tokens`));
  facts.append(...response.flags.map(flag => element("span", "flag", flag)));
  const body = element("div");
  if (response.turns.length)
    body.append(element("ol", "turns", ...response.turns.map(turn =>
      element("li", turn.role, element("p", "soft small", turn.caption), textBox(turn.text, "turn")))));
  else body.append(textBox(response.text, "response"));
  if (response.note) body.append(element("p", "soft small over", response.note));
  return element("div", "response", facts, body);
}

function groupCard({ group, responses }) {
  const from = group.set ? `validation on ${group.set}` : "training";
  const number = responses.length === group.responses.length ? responses.length : `${responses.length} of ${group.responses.length}`;
  const title = `Step ${group.step} · ${from} · ${group.domain} · prompt ${group.id}`;
  const card = element("article", "card group", element("h3", "", title));
  card.append(textBox(group.prompt, "prompt"));
  if (group.answer !== null) card.append(element("p", "answer small", element("strong", "", "Reference answer: "), marked(group.answer)));
  card.append(element("p", "soft small", `${group.tokens.toLocaleString("en")} prompt tokens · ${number} responses`));
  card.append(...responses.slice(0, RESPONSES_AT_FIRST).map(responseCard));
  const rest = responses.slice(RESPONSES_AT_FIRST);
  if (rest.length) {
    const button = element("button", "rest", rest.length === 1 ? "Show 1 more response" : `Show ${rest.length} more responses`);
    button.type = "button";
    button.addEventListener("click", () => {
      const cards = rest.map(responseCard);
      button.replaceWith(...cards);
      focus(cards[0]);
    });
    card.append(button);
  }
  return card;
}

// A button that has shown more cards vanishes; the keyboard focus moves to the first of these cards.
function focus(card) {
  card.tabIndex = -1;
  card.focus();
}

function textOf(response) { return [response.text, response.note, ...response.turns.map(turn => turn.text)].join("\n").toLowerCase(); }

// The responses of a group that pass all filters. If the prompt or the reference answer contains the search text, all responses match it.
function passing(group, wish) {
  if (wish.set && (group.set || "-") !== wish.set) return [];
  if (wish.step && String(group.step) !== wish.step) return [];
  if (wish.domain && group.domain !== wish.domain) return [];
  const inPrompt = !asked || `${group.prompt}\n${group.answer ?? ""}`.toLowerCase().includes(asked);
  return group.responses.filter(response =>
    (wish.low === "" || (response.reward !== null && response.reward >= Number(wish.low)))
    && (wish.high === "" || (response.reward !== null && response.reward <= Number(wish.high)))
    && (!wish.flag || (wish.flag === "-" ? !response.flags.length : response.flags.includes(wish.flag)))
    && (inPrompt || textOf(response).includes(asked)));
}

function extreme(entry, pick) { return pick(...entry.responses.map(response => response.reward ?? NaN).filter(reward => !isNaN(reward))); }

const ORDERS = {
  new: (one, other) => other.group.step - one.group.step,
  old: (one, other) => one.group.step - other.group.step,
  best: (one, other) => extreme(other, Math.max) - extreme(one, Math.max) || 0,
  worst: (one, other) => extreme(one, Math.min) - extreme(other, Math.min) || 0,
};

function showMore() {
  const list = document.getElementById("groups"), more = document.getElementById("more");
  const cards = found.slice(visible, visible + GROUPS_AT_A_TIME).map(groupCard);
  list.append(...cards);
  visible += cards.length;
  more.hidden = visible >= found.length;
  more.textContent = `Show ${Math.min(GROUPS_AT_A_TIME, found.length - visible)} more of ${found.length.toLocaleString("en")} prompts`;
  return cards[0];
}

function search() {
  const wish = Object.fromEntries(new FormData(form));
  asked = wish.text.trim().toLowerCase();
  found = groups.map(group => ({ group, responses: passing(group, wish) })).filter(entry => entry.responses.length);
  found.sort(ORDERS[wish.order]);
  const count = found.reduce((sum, entry) => sum + entry.responses.length, 0);
  document.getElementById("found").textContent = count
    ? `${count.toLocaleString("en")} responses to ${found.length.toLocaleString("en")} prompts` : "No response passes all filters.";
  document.getElementById("groups").replaceChildren();
  visible = 0;
  showMore();
}

if (form) {
  const sets = unique(groups.map(group => group.set || "-"));
  fill("set", "all", sets, set => set === "-" ? "training" : set);
  fill("step", "all steps", unique(groups.map(group => group.step)).sort((one, other) => one - other));
  fill("domain", "all domains", unique(groups.map(group => group.domain)).sort());
  const flags = unique(groups.flatMap(group => group.responses.flatMap(response => response.flags))).sort();
  fill("flag", "any", flags.length ? ["-", ...flags] : [], flag => flag === "-" ? "finished and scored" : flag);
  let waiting;
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 120); });
  form.addEventListener("reset", () => setTimeout(search));
  form.addEventListener("submit", event => { event.preventDefault(); search(); });
  document.getElementById("more").addEventListener("click", () => focus(showMore()));
  search();
}
