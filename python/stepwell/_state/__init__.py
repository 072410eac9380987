"""How values of a state become leaves, and how stored leaves become values again."""
