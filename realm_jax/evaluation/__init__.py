"""Evaluation: answers, recall, masked spans, and the report with intervals."""
