"""An exhaustive check of the publication protocol, in small scope, on the real fold and the real decisions of a writer.

`search` explores any set of states breadth-first, so each counterexample is a shortest one. `world` holds a state of the whole
system and its reductions, `steps` what may happen next, `laws` what must hold, `scopes` the configurations that are explored.
"""
