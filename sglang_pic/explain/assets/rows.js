// Every call as a row: scrolling, pointing and keys. Only the rows in view are in the document.

const OVERSCAN_PX = 200;
const PRINTED_ROWS = 120;

class RowList {
  constructor(model, painter, onChange) {
    this.model = model;
    this.painter = painter;
    this.onChange = onChange;
    this.card = new Card(painter, (call, span) => this.jump(call, span));
    this.host = document.getElementById("bars");
    this.items = []; // a call's number, or ~number of a session for its heading
    this.offsets = new Float64Array(1);
    this.places = new Map(); // a call's number to its place in `items`
    this.drawn = new Map(); // place to node
    this.isGrouped = true;
    this.scale = "one";
    this.longest = 1; // of the calls in `items`
    this.isPrinting = false;
    this.active = null; // { call, span } under the keyboard
    this.marked = null; // { call, start, end } framed after a jump
    this.trail = [];
    this.numDrawn = 0;
    this.listen();
  }

  setItems(items, isGrouped, scale) {
    this.items = items;
    this.isGrouped = isGrouped;
    this.scale = scale;
    this.longest = items.reduce((most, item) => (item < 0 ? most : Math.max(most, this.model.calls[item].length)), 1);
    this.places = new Map(items.map((item, place) => [item, place]));
    this.card.hide();
    this.layOut();
  }

  layOut() {
    const style = getComputedStyle(this.host);
    const rowHeight = parseFloat(style.getPropertyValue("--row"));
    const headHeight = parseFloat(style.getPropertyValue("--head"));
    this.offsets = new Float64Array(this.items.length + 1);
    this.items.forEach((item, i) => { this.offsets[i + 1] = this.offsets[i] + (item < 0 ? headHeight : rowHeight); });
    this.host.style.height = `${this.offsets[this.items.length]}px`;
    this.redraw();
  }

  redraw() {
    for (const node of this.drawn.values()) node.remove();
    this.drawn.clear();
    this.render();
  }

  lengthOf(call) {
    if (this.scale === "call") return call.length;
    return this.scale === "session" ? call.session.longest : this.longest;
  }

  render() {
    let first = 0;
    let last = Math.min(this.items.length, PRINTED_ROWS);
    if (!this.isPrinting) {
      const top = -this.host.getBoundingClientRect().top;
      first = this.placeAt(top - OVERSCAN_PX);
      last = Math.min(this.placeAt(top + window.innerHeight + OVERSCAN_PX) + 1, this.items.length);
    }
    for (const [place, node] of this.drawn) {
      if (place < first || place >= last) {
        node.remove();
        this.drawn.delete(place);
      }
    }
    const fresh = [];
    for (let place = first; place < last; place += 1) {
      if (!this.drawn.has(place)) {
        const node = this.items[place] < 0 ? this.heading(this.model.sessions[~this.items[place]]) : this.row(this.model.calls[this.items[place]]);
        node.style.transform = `translateY(${this.offsets[place]}px)`;
        this.drawn.set(place, node);
        this.host.append(node);
        fresh.push(place);
      }
    }
    // Painted last: reading a width between two insertions would lay the page out each time.
    for (const place of fresh) if (this.items[place] >= 0) this.paint(place);
    this.numDrawn += fresh.length;
    document.documentElement.dataset.rowsDrawn = this.numDrawn;
  }

  placeAt(y) {
    let low = 0;
    let high = this.items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.offsets[middle + 1] <= y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  paint(place) {
    const call = this.model.calls[this.items[place]];
    const node = this.drawn.get(place);
    const marked = this.marked && this.marked.call === call ? this.marked : null;
    const active = this.active && this.active.call === call ? this.active.span : null;
    this.painter.paint(node.querySelector("canvas"), call, this.lengthOf(call), marked || active);
    node.classList.toggle("flash", Boolean(marked));
    node.classList.toggle("active", Boolean(this.active && this.active.call === call));
    node.setAttribute("aria-selected", String(Boolean(this.active && this.active.call === call)));
  }

  row(call) {
    const name = element("span", "name", `${call.index} `);
    const about = [this.isGrouped ? "" : call.session.name, call.agent].filter(Boolean);
    if (about.length) name.append(element("i", "", about.join(" · ")));
    name.title = [nameOf(call), call.agent, call.session.file].filter(Boolean).join("\n");
    const figure = element("span", "figure", count(call.promptLen));
    if (call.lost) figure.prepend(element("b", "", `−${count(call.lost)} `), "of ");
    figure.title = call.lost ? `${count(call.lost)} of ${count(call.promptLen)} prompt tokens lost by the break` : `${plural(call.promptLen, "prompt token")}`;
    const canvas = element("canvas");
    canvas.setAttribute("aria-hidden", "true");
    const node = element("div", "row", name, canvas, figure);
    node.id = `call-${call.number}`;
    node.setAttribute("role", "option");
    node.setAttribute("aria-label", this.describe(call));
    node.setAttribute("aria-setsize", String(this.items.length));
    node.setAttribute("aria-posinset", String(this.places.get(call.number) + 1));
    node.call = call;
    return node;
  }

  describe(call) {
    const parts = [`${nameOf(call)}: ${plural(call.promptLen, "token")}`, `${percent(call.prefixLen, call.promptLen)} prefix`];
    const numRuns = call.spans.filter((span) => span.kind === RUN).length;
    if (numRuns) parts.push(`${percent(call.hitLen, call.promptLen)} in ${plural(numRuns, "run")}`);
    if (call.guardedLen) parts.push(`${plural(call.guardedLen, "token")} computed because of a changed field`);
    if (call.found) parts.push(`prefix ended by: ${call.found.group.cause.label}`);
    return parts.join(", ");
  }

  heading(session) {
    const name = element("b", "", session.name);
    name.title = `${session.name}\n${session.file}`;
    const figures = [plural(session.calls.length, "call"), `${short(session.promptLen)} tokens`, `${percent(session.prefixLen, session.promptLen)} prefix`];
    if (session.hitLen) figures.push(`${percent(session.hitLen, session.promptLen)} recoverable`);
    const node = element("div", "session", name, element("span", "", figures.join(" · ")));
    node.setAttribute("role", "presentation");
    return node;
  }

  // Moves a call to the middle of the view below the pinned head.
  scrollTo(call) {
    const place = this.places.get(call.number);
    const top = this.host.getBoundingClientRect().top + window.scrollY;
    const middle = this.offsets[place] - (window.innerHeight - 60) / 2;
    window.scrollTo({ top: Math.max(0, top + middle), behavior: "instant" });
    this.render();
  }

  select(call, span) {
    const before = this.active;
    this.active = call ? { call, span } : null;
    for (const changed of new Set([before && before.call, call])) this.repaint(changed);
    if (call) this.host.setAttribute("aria-activedescendant", `call-${call.number}`);
    else this.host.removeAttribute("aria-activedescendant");
  }

  repaint(call) {
    const place = call ? this.places.get(call.number) : undefined;
    if (place !== undefined && this.drawn.has(place)) this.paint(place);
  }

  // Shows a span of a call: where a run came from, or where a prefix ended.
  reveal(call, start, end) {
    if (!this.places.has(call.number)) this.onChange.reset();
    const before = this.marked;
    this.card.hide();
    this.marked = { call, start, end };
    this.scrollTo(call);
    this.select(call, this.spanAt(call, Math.min(start, call.promptLen - 1)));
    if (before) this.repaint(before.call);
    this.host.focus({ preventScroll: true });
  }

  jump(call, span) {
    this.trail.push({ call, start: span.start, end: span.end });
    const { start, end, donor, shift } = span;
    this.reveal(donor, start - shift, Math.min(end - shift, donor.length));
    this.onChange.trail(this.trail);
  }

  back() {
    const last = this.trail.pop();
    if (last) this.reveal(last.call, last.start, last.end);
    this.onChange.trail(this.trail);
  }

  spanAt(call, token) {
    return call.spans.find((span) => token < span.end) ?? call.spans.at(-1);
  }

  spanUnder(event) {
    const node = event.target instanceof Element ? event.target.closest(".row") : null;
    if (!node) return null;
    const box = node.querySelector("canvas").getBoundingClientRect();
    const token = ((event.clientX - box.left) / box.width) * this.lengthOf(node.call);
    if (token < 0 || token >= node.call.promptLen) return null;
    return { call: node.call, span: this.spanNear(node.call, token, this.lengthOf(node.call) / box.width), node };
  }

  // The span at a token, or a run beside it that is too narrow to be pointed at.
  spanNear(call, token, tokensPerPixel) {
    const exact = this.spanAt(call, token);
    const reach = 2 * tokensPerPixel;
    if (exact.kind === RUN || exact.end - exact.start < 8 * tokensPerPixel) return exact;
    const isThin = (span) => span.kind === RUN && span.end - span.start < 4 * tokensPerPixel;
    return call.spans.find((span) => isThin(span) && span.start - reach <= token && token <= span.end + reach) ?? exact;
  }

  anchorOf(node, x) {
    const { top, bottom } = node.getBoundingClientRect();
    return { top, bottom, x };
  }

  listen() {
    let isQueued = false;
    const queue = (work) => () => {
      if (isQueued) return;
      isQueued = true;
      requestAnimationFrame(() => { isQueued = false; work(); });
    };
    window.addEventListener("scroll", queue(() => this.render()), { passive: true });
    new ResizeObserver(queue(() => this.layOut())).observe(document.getElementById("ticks"));
    this.host.addEventListener("pointermove", (event) => this.point(event));
    this.host.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.card.hide(); });
    this.host.addEventListener("click", (event) => this.click(event));
    this.host.addEventListener("keydown", (event) => this.key(event));
    // A click also brings the focus, but selects a span of its own.
    this.host.addEventListener("focus", () => { if (!this.active && this.host.matches(":focus-visible")) this.step(0); });
    this.host.addEventListener("blur", () => this.card.hide());
    window.addEventListener("beforeprint", () => this.print(true));
    window.addEventListener("afterprint", () => this.print(false));
  }

  point(event) {
    if (event.pointerType !== "mouse") return;
    const under = this.spanUnder(event);
    this.host.style.cursor = under && under.span.kind === RUN ? "pointer" : "";
    if (under) this.card.show(under.call, under.span, this.anchorOf(under.node, event.clientX), false);
    else this.card.hide();
  }

  click(event) {
    const under = this.spanUnder(event);
    if (!under) return;
    const isTouch = event.pointerType === "touch" || event.pointerType === "pen";
    if (under.span.kind === RUN && !isTouch) {
      this.jump(under.call, under.span);
    } else {
      this.select(under.call, under.span);
      if (isTouch) this.card.show(under.call, under.span, null, true);
    }
  }

  key(event) {
    const page = Math.max(1, Math.floor(window.innerHeight / 60));
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const sides = { ArrowRight: 1, ArrowLeft: -1 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in steps) this.step(steps[event.key]);
    else if (event.key in sides) this.stepSide(sides[event.key]);
    else if (event.key === "Enter" && this.active && this.active.span.kind === RUN) this.jump(this.active.call, this.active.span);
    else if (event.key === "Escape") this.card.hide();
    else if (event.key === "Backspace" || event.key === "b") this.back();
    else return;
    event.preventDefault();
  }

  // Up and down over calls, past the headings.
  step(by) {
    const calls = this.items;
    if (!calls.some((item) => item >= 0)) return;
    let place = this.active && this.places.has(this.active.call.number) ? this.places.get(this.active.call.number) : this.placeInView();
    place = Math.min(Math.max(place + by, 0), calls.length - 1);
    const onward = by < 0 && place > 0 ? -1 : 1;
    while (place >= 0 && place < calls.length && calls[place] < 0) place += onward;
    if (place < 0) place = calls.findIndex((item) => item >= 0);
    if (place >= calls.length) return;
    const call = this.model.calls[calls[place]];
    const span = (call.found && this.spanAt(call, Math.min(call.found.at, call.promptLen - 1))) || this.spanAt(call, 0);
    this.focusSpan(call, span);
  }

  placeInView() {
    return this.placeAt(Math.max(0, 160 - this.host.getBoundingClientRect().top));
  }

  stepSide(by) {
    if (!this.active) return this.step(0);
    const { spans } = this.active.call;
    const at = spans.findIndex((span) => span.start === this.active.span.start);
    return this.focusSpan(this.active.call, spans[Math.min(Math.max(at + by, 0), spans.length - 1)]);
  }

  focusSpan(call, span) {
    const before = this.marked;
    this.marked = null;
    if (before) this.repaint(before.call);
    const place = this.places.get(call.number);
    const top = this.host.getBoundingClientRect().top + this.offsets[place];
    if (top < 150 || top > window.innerHeight - 80) this.scrollTo(call);
    this.select(call, span);
    const node = this.drawn.get(place);
    const box = node.querySelector("canvas").getBoundingClientRect();
    const x = box.left + (span.start / this.lengthOf(call)) * box.width;
    this.card.show(call, span, this.anchorOf(node, x), window.innerWidth <= 640);
  }

  print(isPrinting) {
    this.isPrinting = isPrinting;
    document.documentElement.classList.toggle("paper", isPrinting);
    this.painter.readColours();
    const isPart = this.items.length > PRINTED_ROWS;
    document.getElementById("printed").textContent = isPart ? "The print shows the first calls only; filter or sort to choose them." : "";
    this.redraw();
  }
}
