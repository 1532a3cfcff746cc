"""The figures of a report: what plotly draws, a sentence that says what to look for, and the numbers in a few rows."""
