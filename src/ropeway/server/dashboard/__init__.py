"""The dashboard: one page, its script and style, and what they show."""
