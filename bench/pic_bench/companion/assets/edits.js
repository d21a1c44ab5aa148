// The changed-field experiment: the new prompt as one policy served it, and what every policy answered.

const FULL = "full prefill";
const ARMS = { stale: "old prompt", in_place: "in_place", notes: "notes", recompile: "recompile", full: FULL };
const FAMILIES = {
  directory: "a line elsewhere says what belongs to the value", chain: "two such lines, one after the other",
  overwrite: "the field is set a second time", threshold: "which side of a limit", negation: "a statement or its denial",
  json: "the field is in a state object", irrelevant: "the answer does not depend on it", clock: "a clock or an id",
};

class Edits {
  constructor({ formats, prompts }, texts) {
    Object.assign(this, { formats, texts });
    this.templates = [...Map.groupBy(prompts, (prompt) => prompt.template).values()];
    this.lists = { template: byId("template"), change: byId("change"), format: byId("format") };
    fill(this.lists.template, this.templates, ([first]) => first.template.replaceAll("-", " "), ([first]) => FAMILIES[first.family]);
    fill(this.lists.format, formats, ([title]) => title);
    this.lists.template.value = Math.max(0, this.templates.findIndex(([first]) => first.template === "parcel-desk"));
    this.lists.template.addEventListener("change", () => this.showTemplate());
    this.lists.change.addEventListener("change", () => this.showPrompt());
    this.lists.format.addEventListener("change", () => this.showPrompt());
    byId("policy").addEventListener("change", () => this.showPrompt());
    this.showTemplate();
  }

  showTemplate() {
    this.prompts = this.templates[this.lists.template.value];
    fill(this.lists.change, this.prompts, (prompt) => this.nameOf(prompt));
    this.lists.change.value = Math.max(0, this.prompts.findIndex((prompt) => prompt.outcomes[this.lists.format.value].notes));
    this.showPrompt();
  }

  nameOf(prompt) {
    const changed = (prompt.segments ?? []).filter((segment) => segment.old !== undefined);
    const values = changed.map((segment) => `${clip(this.texts[segment.old].trim(), 24)} → ${clip(this.texts[segment.text].trim(), 24)}`);
    const fields = prompt.numFields > 1 ? `, ${prompt.numFields} fields` : "";
    return `${values[0] ?? "another value"}${fields}, ${plural(prompt.distance, "token")} before the rules`;
  }

  showPrompt() {
    const prompt = this.prompts[this.lists.change.value || 0];
    const policy = byId("policy").querySelector("input:checked").value;
    const outcomes = prompt.outcomes[this.lists.format.value];
    byId("edit-record").textContent = code(this.formats[this.lists.format.value][1]);
    this.showText(prompt, policy);
    const box = byId("answer");
    if (outcomes[policy]) box.replaceChildren(...this.answer(prompt, policy, outcomes));
    else box.replaceChildren(element("p", "", "This model answers the old and the new prompt too much alike for anything to be recovered, so the policies were not measured on it. Choose another model or change."));
  }

  showText(prompt, policy) {
    const nodes = [];
    for (const segment of prompt.segments ?? []) {
      const isMoved = policy === "in_place" ? segment.inPlace : policy === "notes" && segment.notes;
      if (segment.old !== undefined) {
        if (this.texts[segment.old]) nodes.push(element("del", "", this.texts[segment.old]));
        nodes.push(element("ins", "", this.texts[segment.text]));
      } else nodes.push(element("span", isMoved ? "moved" : "computed", this.texts[segment.text]));
    }
    if (!nodes.length) nodes.push("Today's planner would splice other tokens of this prompt than the recorded server did, so it is not drawn.");
    byId("prompt").replaceChildren(...nodes);
  }

  answer(prompt, policy, outcomes) {
    const { spliced = 0, kl = 0, recovery } = outcomes[policy];
    const head = [element("h3", "", `${policy}: ${percent(spliced / prompt.promptLen, 1)} spliced`)];
    const isTold = typeof recovery === "number";
    if (isTold) {
      head.push(element("p", "small", "The answer's next token is ", element("b", "", prompt.oldAnswer.trim()), " under the old value, ", element("b", "", prompt.newAnswer.trim()), ` under the new one. Between the two this went ${recovery.toFixed(2)} of the way.`), this.scale(policy, outcomes));
    } else head.push(element("p", "small", `Nothing in the answer depends on the field. It stands ${nats(kl)} nats from a full prefill's.`));
    return [element("div", "", ...head), this.table(prompt, policy, outcomes, isTold)];
  }

  scale(policy, outcomes) {
    const scale = element("div", "scale");
    scale.setAttribute("aria-hidden", "true");
    for (const name of ["in_place", "notes", "recompile"].filter((name) => outcomes[name])) {
      const mark = element("i", name === policy ? "chosen" : "");
      mark.style.left = length(outcomes[name].recovery);
      mark.title = name;
      scale.append(mark);
    }
    scale.append(element("span", "", "0: by the old value"), element("span", "", "1: as a full prefill"));
    return scale;
  }

  table(prompt, policy, outcomes, isTold) {
    const head = ["", "spliced", "KL", ...(isTold ? ["recovery"] : []), "likeliest token"];
    const rows = Object.entries(ARMS).filter(([name]) => outcomes[name]).map(([name, label]) => {
      const { said = "", spliced = 0, kl = 0, recovery } = outcomes[name];
      const moved = ["stale", "full"].includes(name) ? "–" : percent(spliced / prompt.promptLen, 1);
      const cells = [moved, nats(kl), ...(isTold ? [recovery.toFixed(2)] : []), visible(said)];
      return element("tr", name === policy ? "chosen" : "", element("th", "", label), ...cells.map((cell) => element("td", "", cell)));
    });
    return element("table", "", element("thead", "", element("tr", "", ...head.map((cell) => element("th", "", cell)))), element("tbody", "", ...rows));
  }
}
