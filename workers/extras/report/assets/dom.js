// Elements, tables and texts of the page. Texts of a run go into text nodes only: no markup is ever parsed.

/**
 * Make an element.
 * @param {string} tag Name of the element.
 * @param {Object<string, *>} [attributes] Attributes; those whose value is null or false are left out.
 * @param {...(Node|string|number|null)} children Its content; null is left out.
 * @returns {HTMLElement} The element.
 */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((each) => each !== null && each !== undefined).map((each) => (each instanceof Node ? each : String(each))));
  return made;
}

/**
 * Replace the content of an element, if it changes.
 * @param {HTMLElement} root The element.
 * @param {...(Node|string|null)} children Its new content.
 */
function fill(root, ...children) {
  root.replaceChildren(...children.filter((each) => each !== null && each !== undefined));
}

/** @returns {string} A custom property of the page's style, such as a colour, as it is in the present theme. */
function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * A table that keeps its place on the page, and its scroll position, when its rows change.
 *
 * A column is [heading, cell of a row, how]: "number" aligns to the right, "wrap" lets a text have several lines.
 */
class Table {
  /**
   * @param {string} label What the table is of, for readers of the page who do not see it.
   * @param {Array<Array>} columns Columns.
   * @param {string} [none] Text that stands in place of a table without rows.
   */
  constructor(label, columns, none = "None.") {
    this.columns = columns;
    this.body = el("tbody");
    const heads = columns.map(([name, , how]) => el("th", { scope: "col", class: how === "number" ? "number" : null }, name));
    this.scroll = el("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": label }, el("table", {}, el("thead", {}, el("tr", {}, ...heads)), this.body));
    this.none = el("p", { class: "soft" }, none);
    this.node = el("div", {}, this.scroll, this.none);
  }

  /** Show these rows. */
  show(rows) {
    this.scroll.hidden = rows.length === 0;
    this.none.hidden = rows.length > 0;
    fill(this.body, ...rows.map((row) => el("tr", {}, ...this.columns.map(([, cell, how]) => el("td", { class: how ?? null }, cell(row) ?? "–")))));
  }
}

/** @returns {HTMLElement} An element that opens to show others. */
function opened(summary, ...children) {
  return el("details", {}, el("summary", {}, summary), ...children);
}

/** @returns {string} A number with few digits. */
function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(2);
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

/** @returns {string} Seconds as text: "310 ms", "4.2 s", "3 min 20 s", "5 h 2 min". */
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 1e-3) return `${short(seconds * 1e6)} µs`;
  if (seconds < 1) return `${short(seconds * 1e3)} ms`;
  if (seconds < 60) return `${short(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} days`;
}

/** @returns {string} Bytes as text: "12.4 MB". */
function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; bytes >= 1000 && at < units.length - 1; at += 1) bytes /= 1000;
  return `${short(bytes)} ${units[at]}`;
}

/** @returns {string} A share from 0 to 1 as text: "35 %". */
function share(part) {
  return part === null || part === undefined ? "–" : `${Math.round(part * 100)} %`;
}

/** @returns {string} A time, in seconds since the epoch, as the reader's clock has it. */
function clock(seconds, withDay = true) {
  if (seconds === null || seconds === undefined) return "–";
  const at = new Date(seconds * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} `;
  return `${withDay ? day : ""}${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}
