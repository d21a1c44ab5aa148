// Puts the page together: causes, filters, bars.

function roundTick(most) {
  const rough = most / 6;
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= rough) || power;
}

class Explorer {
  constructor(model) {
    this.model = model;
    this.filter = { find: "", cause: "", group: null, sort: "order", scale: "one" };
    this.painter = new Painter();
    this.rows = new RowList(model, this.painter, { reset: () => this.reset(), trail: (trail) => this.showTrail(trail) });
    this.controls = Object.fromEntries(["find", "cause", "sort", "scale"].map((name) => [name, document.getElementById(name)]));
    this.controls.cause.append(...model.causes.map(({ key, label, numCalls }) => new Option(`${label} (${count(numCalls)})`, key)));
    for (const [name, control] of Object.entries(this.controls)) {
      control.addEventListener("input", () => { this.filter[name] = control.value; this.apply(); });
    }
    document.getElementById("reset").addEventListener("click", () => this.reset());
    document.getElementById("back").addEventListener("click", () => this.rows.back());
    document.getElementById("place-off").addEventListener("click", () => { this.filter.group = null; this.apply(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.painter.readColours(); this.rows.redraw(); });
    new CauseList(model, this);
    this.apply();
  }

  // Whether the filters let a call through.
  accepts(call) {
    const { find, cause, group } = this.filter;
    if (group && (!call.found || call.found.group !== group)) return false;
    if (!this.isOfCause(call, cause)) return false;
    if (!find) return true;
    const text = `${call.session.name}\n${call.session.file}\n${call.agent}`.toLowerCase();
    return text.includes(find.toLowerCase());
  }

  isOfCause(call, cause) {
    if (cause === "lost") return call.lost > 0;
    if (cause === "none") return !call.found;
    if (cause === "appended") return !call.found && call.repeatedLen > 0;
    if (cause === "changed") return call.changedFields.length > 0;
    return !cause || Boolean(call.found && call.found.group.cause.key === cause);
  }

  apply() {
    const { sort, scale, group } = this.filter;
    const calls = this.model.calls.filter((call) => this.accepts(call));
    let items = [];
    if (sort === "lost") {
      calls.sort((a, b) => b.lost - a.lost || a.number - b.number);
      items = calls.map((call) => call.number);
    } else {
      let session = null;
      for (const call of calls) {
        if (call.session !== session) {
          session = call.session;
          items.push(~session.number);
        }
        items.push(call.number);
      }
    }
    this.rows.setItems(items, sort === "order", scale);
    this.showTicks(scale);
    const isAll = calls.length === this.model.calls.length;
    document.getElementById("shown").textContent = isAll ? plural(calls.length, "call") : `${count(calls.length)} of ${plural(this.model.calls.length, "call")}`;
    document.getElementById("empty").classList.toggle("hidden", calls.length > 0);
    document.getElementById("reset").classList.toggle("hidden", isAll);
    document.getElementById("place").classList.toggle("hidden", !group);
    if (group) document.getElementById("place-name").textContent = `${group.cause.label}: ${group.signature || "all places"}`;
  }

  showTicks(scale) {
    const host = document.getElementById("ticks");
    host.replaceChildren();
    if (scale !== "one") {
      host.append(...[0, 25, 50, 75].map((share) => this.tick(share, `${share} %`)));
      return;
    }
    const most = this.rows.longest;
    const step = roundTick(most);
    for (let at = 0; at <= most * 0.97; at += step) host.append(this.tick((100 * at) / most, at ? short(at) : "0 tokens"));
  }

  tick(share, label) {
    const node = element("span", "", label);
    node.style.left = `${share}%`;
    return node;
  }

  set(changes) {
    Object.assign(this.filter, changes);
    for (const [name, control] of Object.entries(this.controls)) control.value = this.filter[name];
    this.apply();
  }

  reset() {
    this.set({ find: "", cause: "", group: null });
  }

  // Shows the bars of what matches these changes alone.
  show(changes) {
    this.set({ find: "", cause: "", group: null, ...changes });
    document.getElementById("calls").scrollIntoView();
  }

  showCall(call) {
    this.rows.reveal(call, call.found.at, Math.min(call.promptLen, call.found.at + Math.max(1, call.found.newLen ?? 1)));
  }

  showTrail(trail) {
    const back = document.getElementById("back");
    back.classList.toggle("hidden", !trail.length);
    if (trail.length) back.textContent = `← back to ${nameOf(trail[trail.length - 1].call)}`;
  }
}

begin((data) => new Explorer(buildModel(data)));
