// What broke the prefix: causes, the places of each, and the calls of each place.

const PLACES_AT_FIRST = 3;
const PLACES_MORE = 20;
const CALLS_MORE = 20;

class CauseList {
  constructor(model, actions) {
    this.model = model;
    this.actions = actions;
    const costly = model.causes.filter((cause) => cause.numLost > 0);
    const harmless = model.causes.filter((cause) => cause.numLost === 0);
    this.most = costly.length ? costly[0].numLost : 1;
    this.all = costly.reduce((sum, cause) => sum + cause.numLost, 0);
    const host = document.getElementById("causes");
    if (!costly.length) host.append(this.nothingLost());
    host.append(...costly.map((cause) => this.cause(cause)));
    if (model.appending.length) host.append(this.appended());
    if (harmless.length) host.append(this.harmless(harmless));
  }

  nothingLost() {
    const breaks = this.model.causes.some((cause) => cause.key !== "rewind");
    const text = breaks
      ? "No break cost anything: behind each of them the text is new."
      : "Nothing broke: every call continues an earlier one, or is the first of its kind.";
    return element("p", "notice", text);
  }

  cause(cause) {
    const fill = element("i");
    fill.style.width = `${(100 * cause.numLost) / this.most}%`;
    const sum = element("div", "sum", element("b", "", short(cause.numLost)), " tokens");
    sum.append(element("small", "", `${plural(cause.numCalls, "call")}, ${percent(cause.numLost, this.all)} of the loss`), element("small", "", `${percent(cause.numRecovered, cause.numLost)} of it recoverable`));
    sum.title = `${count(cause.numLost)} tokens were there before; ${count(cause.numBehind)} tokens stand behind these breaks in all`;
    const header = element("header", "");
    header.append(element("div", "", element("h3", "", cause.label), element("p", "", cause.advice)), sum, element("div", "share", fill));
    const places = element("div");
    const footer = element("footer", "screen");
    const article = element("article", "cause", header, places, footer);
    article.dataset.cause = cause.key;
    const more = button("", () => this.morePlaces(cause, places, more, PLACES_MORE));
    footer.append(more, button("Show these calls as bars", () => this.actions.show({ cause: cause.key, sort: "lost" })));
    // Places that cost nothing wait behind the button.
    const costly = cause.groups.filter((group) => group.numLost > 0).length;
    this.morePlaces(cause, places, more, Math.min(PLACES_AT_FIRST, costly));
    return article;
  }

  morePlaces(cause, places, more, step) {
    const shown = places.childElementCount;
    places.append(...cause.groups.slice(shown, shown + step).map((group) => this.place(group)));
    const left = cause.groups.length - places.childElementCount;
    more.textContent = left > PLACES_MORE ? `${PLACES_MORE} more places (of ${count(left)})` : `${plural(left, "more place")}`;
    more.classList.toggle("hidden", left === 0);
  }

  place(group) {
    const { found: example, agent } = this.model.calls[group.worstCall];
    const cost = element("div", "cost", element("b", "", `${short(group.numLost)} tokens`), element("small", "", plural(group.numCalls, "call")));
    cost.append(element("small", "", `e.g. ${sizes(example)}`));
    const text = diff(example);
    if (group.cause.key === "agent" && agent) text.prepend(element("span", "who", agent));
    const place = element("details", "place", element("summary", "", cost, text));
    place.addEventListener("toggle", () => {
      if (place.open && place.childElementCount === 1) place.append(this.callsOf(group));
    });
    return place;
  }

  callsOf(group) {
    const list = element("ol");
    const more = button("", () => this.moreCalls(group, list, more));
    const box = element("div", "calls-of", list);
    box.append(element("div", "buttons", more, button("Show these calls as bars", () => this.actions.show({ group, sort: "lost" }))));
    this.moreCalls(group, list, more);
    return box;
  }

  moreCalls(group, list, more) {
    const shown = list.childElementCount;
    for (const call of group.calls.slice(shown, shown + CALLS_MORE)) {
      const top = element("div", "", button(nameOf(call), () => this.actions.showCall(call), "link"));
      if (call.agent) top.append(element("span", "", call.agent));
      top.append(element("span", "", `${count(call.lost)} of ${count(call.promptLen - call.found.at)} tokens behind it were there before`));
      const neighbor = this.model.calls[call.found.neighbor];
      const where = neighbor.session === call.session ? `call ${neighbor.index}` : nameOf(neighbor);
      top.append(element("span", "", `${sizes(call.found)}, against ${where}`));
      list.append(element("li", "", top, diff(call.found)));
    }
    const left = group.calls.length - list.childElementCount;
    more.textContent = left > CALLS_MORE ? `${CALLS_MORE} more calls (of ${count(left)})` : plural(left, "more call");
    more.classList.toggle("hidden", left === 0);
  }

  // Repeats in appended text, which no break caused.
  appended() {
    const { appending } = this.model;
    const tokens = appending.reduce((sum, call) => sum + call.repeatedLen, 0);
    const text = "The prefix held. What was appended behind it was there before: a file read again, a record looked up twice, a quoted answer.";
    const sum = element("div", "sum", element("b", "", short(tokens)), " tokens", element("small", "", plural(appending.length, "call")));
    const header = element("header", "", element("div", "", element("h3", "", "Nothing broke, but the new text repeats"), element("p", "", text)), sum);
    const show = button("Show these calls as bars", () => this.actions.show({ cause: "appended", sort: "order" }));
    return element("article", "cause", header, element("footer", "screen", show));
  }

  harmless(causes) {
    const line = element("p", "harmless muted", "Nothing lost: ");
    causes.forEach((cause, i) => {
      const link = button(cause.label.toLowerCase(), () => this.actions.show({ cause: cause.key, sort: "lost" }), "link");
      link.title = cause.advice;
      line.append(i ? ", " : "", link, ` (${plural(cause.numCalls, "call")})`);
    });
    line.append(".");
    return line;
  }
}
