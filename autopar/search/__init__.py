"""The search for the plan of a step: drives the solver, the emitted programs and the simulator.

`pipelining.plan_step` is the entry. A step in one piece is solved and simulated, and its
collectives are joined, cut or fused; pipelines are bounded by shape, and the most promising shapes
are planned stage by stage.
"""
