"""The tools, dialogue formats and wording of the search agent."""
