"""A user-defined tool in one file: `agent.tools=[example/tools/calculator.py:Calculator]`.

In a tag dialogue the policy writes `<calculator> (2 + 3) * 4 </calculator>`.
"""

import ast
import operator

from verl.agent.interface import Item, Observation, Tool, text_arguments

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
MAX_CHARS = 200


class Calculator(Tool):
    """Adds, subtracts, multiplies and divides."""

    name = "calculator"
    description = "Computes an expression with numbers, + - * / // % and parentheses."
    parameters = text_arguments(expression="Such as (2 + 3) * 4.")

    async def call(self, expression: str) -> Observation:
        """Return the value, or an error message for an invalid expression."""
        try:
            if len(expression) > MAX_CHARS:
                raise ValueError(f"over {MAX_CHARS} characters")
            text = f"{value(ast.parse(expression, mode='eval').body):.10g}"
        except (ArithmeticError, SyntaxError, ValueError) as error:
            text = f"Error: {error}"
        return Observation((Item(text),))


def value(node: ast.expr) -> float:
    """Return the value of an expression. Raises ValueError for anything but arithmetic."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.operand))
    raise ValueError(f"got {ast.unparse(node)!r}, expected numbers and + - * / // %")
