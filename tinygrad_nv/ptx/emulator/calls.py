"""Calls of `.func` functions, expanded: a kernel with calls becomes one without.

Protocol: `expanded(module, function)` gives the function itself when it calls nothing, else a copy in which
the body of each callee stands at the place of its call, with registers, labels and local variables of its
own. Parameters and results in .param space are the caller's variables, now in local memory; `ret` is a branch
to the end. Shared variables stay those of the callee, one for all of its calls. `vprintf` and `__assertfail`
stay calls (lower_control.py). Recursion, calls through a register, and functions
without a body are a `PTXError` at the call.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.syntax import (
    Address,
    Instruction,
    Operand,
    Pair,
    PTXFunction,
    PTXModule,
    Register,
    Symbol,
    Variable,
    Vector,
)

MOST_INSTRUCTIONS = 1 << 17     # limit: instructions of a kernel with its calls expanded
MOST_CALLS = 1 << 13            # limit: calls of a kernel, expanded
MOST_CALL_DEPTH = 100           # limit: calls of functions in each other, in PTX
LOCAL = {"param": "local", "param::func": "local"}


def expand_calls(module: PTXModule, function: PTXFunction) -> PTXFunction:
    """The function without calls. Raises `PTXError` at a call that cannot be expanded."""
    if not any(i.mnemonic == "call" for i in function.body): return function
    out = replace(function, variables={}, body=[], labels={}, tables={})
    Expansion(module, out).splice(Frame(function, "", "", {}, (function.name,)))
    return out


@dataclass
class Frame:
    """One call: what is put before the callee's names, the label of its end, and which of its variables are
    the caller's. `chain`: the functions it was called through."""
    function: PTXFunction
    prefix: str
    end: str
    same: dict[str, str]
    chain: tuple[str, ...]

    def name(self, name: str) -> str:
        """Returns the name of one of the function's variables in the expansion."""
        if name in self.same: return self.same[name]
        own = self.function.variables.get(name)
        if own is not None: return name if own.space == "shared" else self.prefix + name
        return name

    def operand(self, operand: Operand, branch: bool = False) -> Operand:
        """An operand with its names as they are in the expansion; `branch`: symbols are labels."""
        if isinstance(operand, Register):
            return operand if operand.kind == "special" else replace(operand, name=self.prefix + operand.name)
        if isinstance(operand, Symbol):
            return Symbol(self.prefix + operand.name if branch else self.name(operand.name), operand.offset)
        if isinstance(operand, Vector): return Vector(tuple(self.operand(x) for x in operand.items))
        if isinstance(operand, Pair):
            return Pair(self.operand(operand.first), self.operand(operand.second))  # type: ignore[arg-type]
        if isinstance(operand, Address):
            vector = None if operand.coordinates is None else self.operand(operand.coordinates)
            return Address(self.operand(operand.base), operand.offset, vector)  # type: ignore[arg-type]
        return operand

    def is_local(self, instruction: Instruction) -> bool:
        """Whether .param is, in this instruction, a variable of the function and no kernel parameter."""
        if self.prefix: return True
        bases = [x.base for x in instruction.operands if isinstance(x, Address)]
        return any(isinstance(x, Symbol) and x.name in self.function.variables for x in bases)


@dataclass
class Expansion:
    """The function under construction."""
    module: PTXModule
    out: PTXFunction
    calls: int = 0

    def splice(self, frame: Frame) -> None:
        """Appends a function's body."""
        function, prefix = frame.function, frame.prefix
        for variable in function.variables.values():
            space = LOCAL.get(variable.space, variable.space)
            made = replace(variable, name=frame.name(variable.name), space=space)
            self.out.variables[made.name] = made
        for name, labels in function.tables.items():
            self.out.tables[prefix + name] = tuple(prefix + label for label in labels)
        labels_at: dict[int, list[str]] = {}
        for label, at in function.labels.items(): labels_at.setdefault(at, []).append(prefix + label)
        for number, instruction in enumerate(function.body):
            for label in labels_at.get(number, ()): self.out.labels[label] = len(self.out.body)
            self.instruction(frame, instruction, number == len(function.body) - 1)
        for label in labels_at.get(len(function.body), ()): self.out.labels[label] = len(self.out.body)

    def instruction(self, frame: Frame, instruction: Instruction, last: bool) -> None:
        """Appends an instruction of the function, or what its call stands for."""
        guard = instruction.guard
        if guard is not None: guard = replace(guard, name=frame.prefix + guard.name)
        branch = instruction.mnemonic in ("bra", "brx")
        operands = tuple(frame.operand(x, branch) for x in instruction.operands)
        made = replace(instruction, guard=guard, operands=operands)
        if frame.is_local(instruction):
            made = replace(made, modifiers=tuple(LOCAL.get(x, x) for x in instruction.modifiers))
        if instruction.mnemonic == "call": self.call(frame, made)
        elif instruction.mnemonic == "ret" and frame.prefix:
            if not last or guard is not None: self.branch(made, frame.end, instruction.negated)
        else: self.out.body.append(made)

    def branch(self, at: Instruction, label: str, negated: bool) -> None:
        """A branch under the guard of an instruction, or under its opposite."""
        self.out.body.append(Instruction("bra", (), at.guard, negated, (Symbol(label),), at.line))

    def call(self, frame: Frame, call: Instruction) -> None:
        """`call{.uni} {(results),} function {, (arguments)};`, operands renamed already."""
        operands = list(call.operands)
        if not operands or operands == [Vector(())]: raise wrong(call, "no function", "a function's name")
        results = operands.pop(0) if isinstance(operands[0], Vector) else Vector(())
        target = operands.pop(0) if operands else Vector(())
        arguments = operands.pop(0) if operands else Vector(())
        if not isinstance(target, Symbol) or not isinstance(arguments, Vector) or operands:
            raise wrong(call, "a call through a register", "a call of a function by its name")
        if target.name in ("__assertfail", "vprintf"): return self.out.body.append(call)
        assert isinstance(results, Vector)
        callee = self.module.callees.get(target.name)
        if callee is None:
            raise wrong(call, f"function {target.name} has no body in this module", "a function that has one",
                        "link it, or compile with relocatable device code off")
        if callee.name in frame.chain:
            raise wrong(call, "recursion: " + " → ".join((*frame.chain, callee.name)),
                        "functions that do not call themselves: calls are expanded",
                        "turn the recursion into a loop")
        formals = (*callee.results.values(), *callee.parameters.values())
        actuals = (*results.items, *arguments.items)
        if len(formals) != len(actuals):
            raise wrong(call, f"{len(actuals)} results and arguments", f"the {len(formals)} of {callee.name}")
        self.expand(frame, call, callee, list(zip(formals, actuals, strict=True)), len(results.items))
        return None

    def expand(self, frame: Frame, call: Instruction, callee: PTXFunction,
               bound: list[tuple[Variable, Operand]], results: int) -> None:
        """The callee's body; results are the first of `bound`, formal and actual parameters."""
        self.calls += 1
        for count, most, what in ((self.calls, MOST_CALLS, "calls"),
                                  (len(frame.chain), MOST_CALL_DEPTH, "calls in each other"),
                                  (len(self.out.body), MOST_INSTRUCTIONS, "instructions")):
            if count > most:
                raise wrong(call, f"more than {most} {what} when calls are expanded", f"at most {most}",
                            "call fewer and smaller functions, or use loops")
        prefix, end = f"{callee.name}#{self.calls}.", f"end of {callee.name}#{self.calls}"
        if call.guard is not None: self.branch(call, end, not call.negated)
        inside = replace(call, guard=None, negated=False)
        same, after = {}, []
        for number, (formal, actual) in enumerate(bound):
            name = prefix + formal.name
            if formal.space == "param" and isinstance(actual, Symbol):
                same[formal.name] = actual.name
                continue
            place: Operand = Register(name, formal.kind)
            if formal.space == "param":
                place = Symbol(name)
                same[formal.name] = name
                self.out.variables[name] = replace(formal, name=name, space="local")
            if number < results: after.append((actual, place, formal.kind))
            else: self.store(inside, place, actual, formal.kind)
        self.splice(Frame(callee, prefix, end, same, (*frame.chain, callee.name)))
        for actual, place, kind in after: self.store(inside, actual, place, kind)
        self.out.labels[end] = len(self.out.body)

    def store(self, at: Instruction, to: Operand, value: Operand, kind: str) -> None:
        """`to = value`: registers, or variables in local memory."""
        def instruction(mnemonic: str, modifiers: tuple[str, ...], *operands: Operand) -> None:
            self.out.body.append(Instruction(mnemonic, modifiers, at.guard, at.negated, operands, at.line))

        if isinstance(to, Symbol): instruction("st", ("local", kind), Address(to), value)
        elif isinstance(value, Symbol): instruction("ld", ("local", kind), to, Address(value))
        else: instruction("mov", (kind,), to, value)


def wrong(call: Instruction, found: str, expected: str, fix: str = "") -> PTXError:
    """An error at a call."""
    return PTXError(f"PTX line {call.line}: {call.opcode}: {found}", call.line, expected, fix)
