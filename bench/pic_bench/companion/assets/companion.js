// Puts the three experiments onto the page.

begin(({ scenes, dials, edits, texts }) => {
  new Calls(scenes, texts);
  for (const dial of dials) new DialView(dial);
  new Edits(edits, texts);
});
