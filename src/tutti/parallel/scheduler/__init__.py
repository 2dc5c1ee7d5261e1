"""Model parallelism by a scheduler, after Strads (Lee et al. 2014, Kim et al. 2016): schedule, push, pull."""

from tutti.parallel.scheduler.factorisation import Factorisation
from tutti.parallel.scheduler.lasso import Lasso
from tutti.parallel.scheduler.orders import ORDERS, Dynamic, Order, Random, RoundRobin
from tutti.parallel.scheduler.problem import Problem
from tutti.parallel.scheduler.solve import Point, Scheduler, Solution, solve

__all__ = [
    "ORDERS",
    "Dynamic",
    "Factorisation",
    "Lasso",
    "Order",
    "Point",
    "Problem",
    "Random",
    "RoundRobin",
    "Scheduler",
    "Solution",
    "solve",
]
