// Unpacks the payload and links its rows, whose names are those of data.py in camelCase.
// Every text in it came from logs: it goes into the page as text nodes and onto canvases only, never as markup.

const PREFIX = "prefix";
const RUN = "run";
const GAP = "gap";

async function readPayload() {
  const holder = document.getElementById("payload");
  const bytes = Uint8Array.from(atob(holder.textContent), (sign) => sign.charCodeAt(0));
  holder.remove();
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

// Shows the data, or says on the page why it cannot be shown; the page's state says which of it came about.
async function begin(show) {
  const began = performance.now();
  try {
    show(await readPayload());
    document.documentElement.dataset.state = "ready";
  } catch (error) {
    document.documentElement.dataset.state = "failed";
    const text = typeof DecompressionStream === "undefined"
      ? "This browser cannot unpack the page's data (DecompressionStream is missing): use one from 2023 or later."
      : `The page's data cannot be shown: ${error}`;
    document.getElementById("headline").textContent = text;
    throw error;
  }
  document.documentElement.dataset.readyMs = Math.round(performance.now() - began);
}

// Numbers of sessions, agents, groups, donors and texts become what they stand for, and sums are added.
function buildModel({ files, sessions, agents, causes, groups, calls, texts }) {
  sessions.forEach((session, number) => {
    Object.assign(session, { number, file: files[session.file], calls: [], longest: 1, promptLen: 0, prefixLen: 0, hitLen: 0 });
  });
  for (const group of groups) group.calls = [];
  for (const cause of causes) {
    cause.groups = cause.groups.map((number) => Object.assign(groups[number], { cause }));
    const sum = (name) => cause.groups.reduce((total, group) => total + group[name], 0);
    Object.assign(cause, { numCalls: sum("numCalls"), numLost: sum("numLost"), numRecovered: sum("numRecovered"), numBehind: sum("numBehind") });
  }
  calls.forEach((call, number) => {
    const session = sessions[call.session];
    Object.assign(call, { number, session, agent: agents[call.agent], hitLen: 0, guardedLen: 0, changedFields: call.changedFields ?? [], length: call.promptLen + call.answerLen });
    for (const span of call.spans) {
      span.kind = "donor" in span ? RUN : span.end <= call.prefixLen ? PREFIX : GAP;
      Object.assign(span, { text: texts[span.text ?? 0], donor: calls[span.donor], shift: span.shift ?? 0, seamLen: span.seamLen ?? 0 });
      if (span.isGuarded) call.guardedLen += span.end - span.start;
      if (span.kind === RUN) call.hitLen += span.end - span.start;
    }
    const { found } = call;
    if (found) {
      found.group = groups[found.group];
      found.group.calls.push(call);
      for (const name of ["before", "old", "new", "after"]) found[name] = texts[found[name]];
    }
    for (const field of call.changedFields) {
      for (const name of ["before", "old", "new", "after"]) field[name] = texts[field[name] ?? 0];
    }
    call.repeatedLen = call.hitLen + call.guardedLen;
    call.lost = found ? found.numLost ?? 0 : 0;
    session.calls.push(call);
    session.longest = Math.max(session.longest, call.length);
    for (const name of ["promptLen", "prefixLen", "hitLen"]) session[name] += call[name];
  });
  for (const group of groups) group.calls.sort((a, b) => b.lost - a.lost || a.number - b.number);
  return { sessions, causes, calls, appending: calls.filter((call) => !call.found && call.repeatedLen) };
}
