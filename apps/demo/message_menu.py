"""The menu of actions on an earlier question; page.py connects the events that it sends."""

from __future__ import annotations

SCRIPT = """
if (!document.getElementById('message-menu')) {
  const menu = document.createElement('div');
  Object.assign(menu, {id: 'message-menu', popover: 'auto'});
  menu.setAttribute('role', 'menu');
  const actions = {
    question: 'Copy the question',
    edit: 'Edit and ask again',
    retry: 'Ask again',
    copy: 'Continue in a copy',
    undo: 'Delete from here',
  };
  for (const [name, textContent] of Object.entries(actions)) {
    const item = Object.assign(document.createElement('button'), {type: 'button', textContent});
    item.dataset.action = name;
    item.tabIndex = -1;
    item.setAttribute('role', 'menuitem');
    menu.append(item);
  }
  const transcript = document.getElementById('transcript');
  transcript.after(menu);
  let opener = null;
  const items = () => [...menu.querySelectorAll('button:enabled')];
  const close = () => {
    if (!menu.matches(':popover-open')) return;
    menu.hidePopover();
    opener.focus();
  };
  const open = (button) => {
    opener = button;
    menu.setAttribute('aria-label', button.ariaLabel);
    for (const name of ['edit', 'retry']) {
      menu.querySelector(`[data-action=${name}]`).disabled = 'lost' in button.dataset;
    }
    menu.showPopover();
    place();
    items()[0].focus();
  };
  const place = () => {
    const {left, top, bottom} = opener.getBoundingClientRect(), {offsetWidth, offsetHeight} = menu;
    const seen = transcript.getBoundingClientRect();
    if (bottom < seen.top || top > seen.bottom) return menu.hidePopover();
    const fits = bottom + offsetHeight + 8 < innerHeight;
    menu.style.left = `${Math.max(8, Math.min(left, innerWidth - offsetWidth - 8))}px`;
    menu.style.top = `${Math.max(8, fits ? bottom + 4 : top - offsetHeight - 4)}px`;
  };
  menu.addEventListener('toggle', ({newState}) => {
    opener.setAttribute('aria-expanded', newState === 'open');
  });
  element.addEventListener('click', (event) => {
    const button = event.target.closest('button.more');
    if (button) open(button);
  });
  menu.addEventListener('click', (event) => {
    const item = event.target.closest('button');
    if (!item) return;
    const {action} = item.dataset, {key} = opener.dataset;
    const said = [...opener.parentElement.querySelectorAll('p')].map((one) => one.textContent);
    close();
    if (action === 'question') {
      return navigator.clipboard?.writeText(said.join('\\n')).catch(() => {});
    }
    const keys = [...element.querySelectorAll('.more')].map((one) => one.dataset.key);
    const asked = document.querySelectorAll('#transcript .asked').length;
    const later = asked - 1 - keys.indexOf(key);
    const removes = later === 1 ? 'the question after it' : `the ${later} questions after it`;
    const needs = action !== 'copy' && later > 0;
    if (needs && !confirm(`This also deletes ${removes}. Continue?`)) return;
    trigger(action, {key});
  });
  menu.addEventListener('keydown', (event) => {
    const all = items(), at = all.indexOf(document.activeElement), {key} = event;
    const next = {ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1}[key];
    if (next !== undefined) all.at(next % all.length).focus();
    else if (key === 'Escape' || key === 'Tab') close();
    else return;
    event.preventDefault();
  });
  // A growing answer scrolls the conversation.
  document.addEventListener('scroll', () => menu.matches(':popover-open') && place(), true);
  watch('value', () => menu.hidePopover());
}
"""
"""Script of the menu that the button next to a question opens. It copies the question itself,
and sends the other actions with the key of the question's exchange, after asking whether later
questions may be deleted."""
