"""What a package of experiments may build on, over and above `import sifu`.

`federations` has engines, clients and records of runs; `attacks` the measures of an audit; `command_line` what a
command prints with. `sifu.engines.flower.virtual_nodes` makes an engine over the Flower nodes of another program.
Names not listed in their `__all__` may change without notice.
"""
