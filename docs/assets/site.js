// Mathematics that arithmatex left as TeX, typeset by the KaTeX beside this file.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const tex = element.textContent.trim();
    katex.render(tex.slice(2, -2), element, { displayMode: tex.startsWith("\\["), throwOnError: true });
    // No line begins with the comma after a short formula; long ones may be broken.
    const next = element.nextSibling;
    const mark = next && next.nodeType === Node.TEXT_NODE && next.data.match(/^[,.;:)]+/);
    if (mark && element.tagName === "SPAN" && tex.length < 20) {
      const together = document.createElement("span");
      together.style.whiteSpace = "nowrap";
      element.before(together);
      together.append(element, mark[0]);
      next.data = next.data.slice(mark[0].length);
    }
  }
});
