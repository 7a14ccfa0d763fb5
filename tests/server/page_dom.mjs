// A document without a browser: as much of the DOM as the page uses, so that its scripts run under Node.  It has no layout and
// no styles; what needs these is tested in a real browser.

const VOID = new Set(["meta", "link", "input", "br", "img", "hr"]);
const ENTITIES = { "&nbsp;": "\u00a0", "&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"' };
const decoded = (text) => text.replace(/&\w+;/g, (one) => ENTITIES[one] ?? one);

class Target {
  listeners = {};

  addEventListener(kind, listener) {
    (this.listeners[kind] ??= []).push(listener);
  }

  dispatchEvent(event) {
    event.target ??= this;
    for (let one = this; one; one = event.bubbles ? one.parentNode : null) {
      for (const listener of one.listeners?.[event.type] ?? []) listener.call(one, event);
    }
    return !event.defaultPrevented;
  }
}

export class Event {
  constructor(type, values = {}) {
    Object.assign(this, { type, bubbles: false, detail: 0, defaultPrevented: false, ...values });
  }

  preventDefault() {
    this.defaultPrevented = true;
  }
}

class Text {
  constructor(data) {
    this.data = data;
  }

  get textContent() {
    return this.data;
  }

  cloneNode() {
    return new Text(this.data);
  }

  remove() {
    this.parentNode?.drop(this);
  }
}

/** Steps of a selector, last first: each a test of one element. */
function compiled(selector) {
  const part = /([a-z][\w-]*)|#([\w-]+)|\.([\w-]+)|\[([\w-]+)(?:=["']?([^\]"']*)["']?)?\]|(:checked)/gy;
  return selector.trim().split(/\s+/).reverse().map((step) => {
    const tests = [];
    part.lastIndex = 0;
    while (part.lastIndex < step.length) {
      const found = part.exec(step);
      if (!found) throw new Error(`no selector of this document: ${selector}`);
      const [, tag, id, kind, name, value, isChecked] = found;
      if (tag) tests.push((one) => one.localName === tag);
      else if (id) tests.push((one) => one.id === id);
      else if (kind) tests.push((one) => one.classList.contains(kind));
      else if (isChecked) tests.push((one) => one.checked);
      else tests.push((one) => (value === undefined ? one.getAttribute(name) !== null : one.getAttribute(name) === value));
    }
    return (one) => tests.every((test) => test(one));
  });
}

function matches(element, selector) {
  return selector.split(",").some((one) => {
    const [own, ...above] = compiled(one);
    if (!own(element)) return false;
    let node = element.parentNode;
    for (const test of above) {
      while (node?.localName && !test(node)) node = node.parentNode;
      if (!node?.localName) return false;
      node = node.parentNode;
    }
    return true;
  });
}

class Element extends Target {
  attributes = new Map();
  childNodes = [];
  parentNode = null;
  style = {};
  scrollTop = 0;
  scrollHeight = 0;
  clientWidth = 600;
  clientHeight = 200;
  offsetTop = 0;

  constructor(name, document) {
    super();
    Object.assign(this, { localName: name, ownerDocument: document });
    this.dataset = new Proxy({}, {
      get: (_, key) => this.getAttribute(`data-${String(key)}`) ?? undefined,
      set: (_, key, value) => (this.setAttribute(`data-${key}`, value), true),
      deleteProperty: (_, key) => (this.removeAttribute(`data-${key}`), true),
    });
  }

  get tagName() { return this.localName.toUpperCase(); }
  get children() { return this.childNodes.filter((one) => one instanceof Element); }
  get id() { return this.getAttribute("id") ?? ""; }
  get className() { return this.getAttribute("class") ?? ""; }
  set className(value) { this.setAttribute("class", value); }
  get classList() {
    const names = this.className.split(/\s+/).filter(Boolean);
    return Object.assign([...names], {
      contains: (one) => names.includes(one),
      add: (one) => { this.className = [...new Set([...names, one])].join(" "); },
      remove: (one) => { this.className = names.filter((other) => other !== one).join(" "); },
    });
  }

  get hidden() { return this.attributes.has("hidden"); }
  set hidden(value) { this.toggleAttribute("hidden", value); }
  get open() { return this.attributes.has("open"); }
  set open(value) { this.toggleAttribute("open", value); }
  get type() { return this.getAttribute("type") ?? (this.localName === "button" ? "submit" : ""); }
  set type(value) { this.setAttribute("type", value); }
  get placeholder() { return this.getAttribute("placeholder") ?? ""; }
  set placeholder(value) { this.setAttribute("placeholder", value); }
  get value() { return this.given ?? (this.localName === "textarea" ? this.textContent : this.getAttribute("value") ?? ""); }
  set value(value) { this.given = String(value); }
  get checked() { return this.isChecked ?? this.attributes.has("checked"); }
  set checked(value) {
    if (value && this.type === "radio") {
      for (const one of this.ownerDocument.querySelectorAll(`input[name=${this.getAttribute("name")}]`)) one.isChecked = false;
    }
    this.isChecked = Boolean(value);
  }

  get textContent() { return this.childNodes.map((one) => one.textContent).join(""); }
  set textContent(text) { this.replaceChildren(...(String(text) ? [String(text)] : [])); }

  getAttribute(name) { return this.attributes.get(name) ?? null; }
  setAttribute(name, value) { this.attributes.set(name, String(value)); }
  removeAttribute(name) { this.attributes.delete(name); }
  toggleAttribute(name, isOn) {
    if (isOn) this.setAttribute(name, "");
    else this.removeAttribute(name);
  }

  append(...nodes) {
    for (const node of nodes) {
      const child = node instanceof Element || node instanceof Text ? node : new Text(String(node));
      child.parentNode?.drop(child);
      child.parentNode = this;
      this.childNodes.push(child);
    }
  }

  drop(child) {
    this.childNodes = this.childNodes.filter((one) => one !== child);
    child.parentNode = null;
  }

  replaceChildren(...nodes) {
    for (const one of this.childNodes) one.parentNode = null;
    this.childNodes = [];
    this.append(...nodes);
  }

  remove() { this.parentNode?.drop(this); }

  cloneNode() {
    const copy = new Element(this.localName, this.ownerDocument);
    for (const [name, value] of this.attributes) copy.setAttribute(name, value);
    copy.append(...this.childNodes.map((one) => one.cloneNode()));
    return copy;
  }

  * descendants() {
    for (const one of this.children) {
      yield one;
      yield* one.descendants();
    }
  }

  matches(selector) { return matches(this, selector); }
  querySelectorAll(selector) { return [...this.descendants()].filter((one) => matches(one, selector)); }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
  closest(selector) {
    for (let one = this; one?.localName; one = one.parentNode) if (matches(one, selector)) return one;
    return null;
  }

  focus() { this.ownerDocument.activeElement = this; }
  select() {}
  scrollIntoView() {}

  click(values = {}) {
    if (this.type === "radio") this.checked = true;
    if (this.type === "checkbox") this.checked = !this.checked;
    const isSubmit = this.localName === "button" && this.type === "submit";
    const isDone = this.dispatchEvent(new Event("click", { bubbles: true, detail: 1, ...values }));
    if (["radio", "checkbox"].includes(this.type)) this.dispatchEvent(new Event("change", { bubbles: true }));
    if (isDone && isSubmit) this.closest("form")?.dispatchEvent(new Event("submit", { bubbles: true }));
  }

  checkValidity() {
    return this.querySelectorAll("input").every((one) => {
      const number = Number(one.value);
      const [low, high] = ["min", "max"].map((name) => one.getAttribute(name));
      if (one.value === "") return one.getAttribute("required") === null;
      if (one.type !== "number") return true;
      return !Number.isNaN(number) && (low === null || number >= Number(low)) && (high === null || number <= Number(high));
    });
  }

  reportValidity() { return this.checkValidity(); }
}

class Document extends Target {
  visibilityState = "visible";
  readyState = "complete";
  cookie = "";
  copied = [];

  constructor(markup) {
    super();
    this.documentElement = parsed(markup, this);
    this.documentElement.parentNode = this;
    this.body = this.querySelector("body");
    this.activeElement = this.body;
  }

  createElement(name) { return new Element(name, this); }
  createElementNS(_, name) { return new Element(name, this); }
  getElementById(id) { return [...this.documentElement.descendants()].find((one) => one.id === id) ?? null; }
  querySelectorAll(selector) { return this.documentElement.querySelectorAll(selector); }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
  execCommand(name) { return name === "copy" && this.copied.push(this.body.children.at(-1).value) > 0; }
}

/** The root element of a page that is well formed. */
function parsed(markup, document) {
  const stack = [new Element("#document", document)];
  const token = /<!--.*?-->|<!doctype[^>]*>|<\/([\w-]+)>|<([\w-]+)((?:\s+[\w-]+(?:="[^"]*")?)*)\s*\/?>|([^<]+)/gis;
  for (const [, end, name, attributes, text] of markup.matchAll(token)) {
    if (end) {
      const closed = stack.pop();
      if (closed.localName !== end) throw new Error(`</${end}> closes <${closed.localName}>`);
    } else if (name) {
      const element = new Element(name, document);
      for (const [, key, value] of attributes.matchAll(/([\w-]+)(?:="([^"]*)")?/g)) element.setAttribute(key, decoded(value ?? ""));
      stack.at(-1).append(element);
      if (!VOID.has(name)) stack.push(element);
    } else if (text) stack.at(-1).append(decoded(text));
  }
  if (stack.length > 1) throw new Error(`<${stack.at(-1).localName}> is not closed`);
  return stack[0].children[0];
}

function storage(values) {
  return {
    values,
    get length() { return Object.keys(values).length; },
    getItem: (name) => values[name] ?? null,
    setItem: (name, value) => { values[name] = String(value); },
    removeItem: (name) => { delete values[name]; },
    clear: () => { for (const name of Object.keys(values)) delete values[name]; },
  };
}

/** A window on a page: what its scripts find as globals. */
export function opened(url, markup, { session = {}, local = {}, dark = false } = {}) {
  const document = new Document(markup);
  const urls = [];
  const plain = globalThis.fetch;
  return {
    document, urls, Event,
    location: { href: url },
    sessionStorage: storage(session),
    localStorage: storage(local),
    navigator: { clipboard: { writeText: async (text) => { document.copied.push(text); } } },
    matchMedia: (query) => ({ matches: dark && query.includes("dark"), addEventListener: () => {} }),
    ResizeObserver: class { observe() {} },
    requestAnimationFrame: (work) => setTimeout(() => work(performance.now()), 5),
    fetch: (path, options) => {
      urls.push(new URL(path, url).href);
      return plain(new URL(path, url), options);
    },
  };
}
