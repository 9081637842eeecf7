"""The live dashboard: a web page that shows runs while they go on, folded from the events that they write anyway."""
