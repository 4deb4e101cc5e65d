"""Keyboard shortcuts of the page: stop an answer, begin a conversation, go to the message."""

from __future__ import annotations

SCRIPT = """
const keys = {stop: 'Escape', clear: 'Control+Shift+O'};
const name = () => {
  for (const [id, key] of Object.entries(keys)) {
    const button = document.getElementById(id);
    // The buttons are made after the header.
    if (!button) return requestAnimationFrame(name);
    button.setAttribute('aria-keyshortcuts', key);
    button.title = key.replace('Control', 'Ctrl').replaceAll('+', ' + ');
  }
};
name();
document.addEventListener('keydown', (event) => {
  const {key, shiftKey} = event, ctrl = event.ctrlKey || event.metaKey;
  if (event.defaultPrevented || event.isComposing) return;
  if (key === 'Escape' && shiftKey) {
    document.querySelector('#message textarea')?.focus();
  } else if (key === 'Escape') {
    // Escape first closes what is open: a picture in full size, or a list of choices.
    if (document.querySelector('dialog[open], [popover]:popover-open')) return;
    if (event.target.closest?.('[aria-expanded=true]')) return;
    document.getElementById('stop')?.click();
  } else if (ctrl && shiftKey && key.toLowerCase() === 'o') {
    event.preventDefault();
    document.getElementById('clear')?.click();
    document.querySelector('#message textarea')?.focus();
  }
});
"""
"""Script that handles the keys. A disabled button does nothing when it is clicked."""
