"""Files that are dropped or pasted anywhere on the page: they become part of the message."""

from __future__ import annotations

SCRIPT = """
const carries = (data) => [...(data?.types ?? [])].includes('Files');
const isWithin = (event, selector) => Boolean(event.target.closest?.(selector));
const add = (files) => {
  const input = document.querySelector('#message input[type=file]');
  if (!input || !files.length) return;
  input.files = files;
  input.dispatchEvent(new Event('change', {bubbles: true}));
  document.querySelector('#message textarea')?.focus();
};
const mark = (isOver) => document.body.toggleAttribute('data-dropping', isOver);
document.addEventListener('dragover', (event) => {
  if (!carries(event.dataTransfer)) return;
  mark(true);
  event.preventDefault();
});
document.addEventListener('dragleave', ({relatedTarget}) => mark(relatedTarget !== null));
document.addEventListener('drop', (event) => {
  mark(false);
  // The message field adds what is dropped on it.
  if (!carries(event.dataTransfer) || isWithin(event, '#message')) return;
  event.preventDefault();
  add(event.dataTransfer.files);
}, true);
document.addEventListener('paste', (event) => {
  if (!carries(event.clipboardData) || isWithin(event, 'input, textarea')) return;
  event.preventDefault();
  add(event.clipboardData.files);
});
"""
"""Script that adds the files to the message, and marks the message while files are dragged."""
