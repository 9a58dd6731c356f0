"""Observe: the step timeline, the verdict, progress, logs, reports, plots."""
