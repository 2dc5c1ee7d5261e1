"""A script that calls `tutti.launch` at its top level, without `if __name__ == "__main__"`."""

import tutti


def work(factor: int) -> int:
    return tutti.init().rank * factor


results = tutti.launch(work, 10, workers=2)
print("results", results)
