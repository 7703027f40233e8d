"""One `Report` of a compiled model, shown as text, JSON or a page of HTML."""
