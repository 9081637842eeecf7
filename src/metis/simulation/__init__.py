"""Virtual time: the controller of the core driven by one event heap on one machine."""
