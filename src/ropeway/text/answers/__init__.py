"""What a model's text means: reasoning, tool calls, and the answer itself, while the text is still coming."""
