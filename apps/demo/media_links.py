"""Links to the media of a conversation, from its memory table and from texts that name them."""

from __future__ import annotations

SCRIPT = r"""
const shown = (name) => {
  const found = element.querySelectorAll(`figure[data-name="${name.toLowerCase()}"]`);
  return [...found].at(-1);
};
const link = () => {
  const names = /\b((?:picture|video|clip) \d+)\b/i;
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    const near = text.parentElement;
    if (!names.test(text.data) || !near.closest('.asked > p, .said')) continue;
    if (near.closest('a, button, pre, code, small, .formula')) continue;
    const parts = text.data.split(names).map((part, place) => {
      if (place % 2 === 0 || !shown(part)) return part;
      const made = Object.assign(document.createElement('a'), {href: '#', textContent: part});
      made.dataset.show = part;
      return made;
    });
    text.replaceWith(...parts);
  }
};
watch('value', link);
link();
if (!document.body.dataset.links) {
  document.body.dataset.links = 'yes';
  document.addEventListener('click', (event) => {
    const {show} = event.target.closest?.('a[data-show]')?.dataset ?? {};
    if (!show) return;
    event.preventDefault();
    const figure = shown(show);
    if (!figure) return;
    document.getElementById('transcript').dataset.away = 'yes';
    figure.scrollIntoView({block: 'center'});
    figure.querySelector('a, button, video')?.focus({preventScroll: true});
    figure.getAnimations().forEach((one) => one.cancel());
    const line = (width) => ({outline: `${width} solid var(--o-lead)`, outlineOffset: '3px'});
    figure.animate([line('3px'), line('3px'), line('0')], 2000);
  });
}
"""
"""Script that turns names such as "picture 57" into links, and shows the medium of a link."""
