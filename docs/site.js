// An interactive schedule is as high as its page, where the browser lets this page look into it.
for (const frame of document.querySelectorAll("iframe.schedules")) {
  const fit = () => {
    const inside = frame.contentDocument;
    if (inside?.body?.scrollHeight) frame.style.height = `${inside.documentElement.offsetHeight + 8}px`;
  };
  frame.addEventListener("load", fit);
  addEventListener("resize", fit);
  fit();
}
