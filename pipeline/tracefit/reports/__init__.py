"""Reports and results for people: as a page, as Markdown, and in a terminal. No metric is computed here."""
