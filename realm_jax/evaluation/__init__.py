"""How well it does: answers, recall, masked spans, and the report with intervals."""
