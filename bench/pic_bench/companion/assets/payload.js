// Unpacks the payload. Its texts came from logs: they go into the page as text nodes only, never as markup.

async function readPayload() {
  const holder = document.getElementById("payload");
  const bytes = Uint8Array.from(atob(holder.textContent), (sign) => sign.charCodeAt(0));
  holder.remove();
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

// Shows the data, or an error; the page's `data-state` says which.
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
