"""Scheduled model parallelism after Strads (Lee et al. 2014, Kim et al. 2016): schedule, push, pull."""

from tutti.parallel.scheduler.factorisation import Factorisation
from tutti.parallel.scheduler.lasso import Lasso
from tutti.parallel.scheduler.problem import BlockProblem
from tutti.parallel.scheduler.selection import SELECTION_RULES, Dynamic, Random, RoundRobin, SelectionRule
from tutti.parallel.scheduler.solve import ProgressPoint, Scheduler, Solution, solve

__all__ = [
    "SELECTION_RULES",
    "BlockProblem",
    "Dynamic",
    "Factorisation",
    "Lasso",
    "ProgressPoint",
    "Random",
    "RoundRobin",
    "Scheduler",
    "SelectionRule",
    "Solution",
    "solve",
]
