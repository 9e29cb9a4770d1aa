"""Structured output: answers to random schemas, and their speed."""
