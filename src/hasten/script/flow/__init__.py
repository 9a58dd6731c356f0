"""What a script does with devices, followed by reading it: values, places, and what was seen."""
