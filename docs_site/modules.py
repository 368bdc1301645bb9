"""How griffe reads the library: a module of Equinox is a dataclass, so its fields are its parameters."""

import griffe


class Modules(griffe.Extension):
    """Gives classes without an `__init__` of their own the one that their fields make."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        _visit(pkg)


def _visit(place: griffe.Module | griffe.Class) -> None:
    for member in list(place.members.values()):
        if member.is_alias:
            continue
        if member.is_module or member.is_class:
            _visit(member)
        if member.is_class and "__init__" not in member.members:
            member.set_member("__init__", _init(member))


def _init(of_class: griffe.Class) -> griffe.Function:
    fields = {}
    for base in [*reversed(of_class.mro()), of_class]:
        for name, field in base.members.items():
            # A field is annotated; what is not is a constant of the class.
            if not field.is_alias and field.is_attribute and field.annotation is not None:
                fields[name] = griffe.Parameter(
                    name,
                    annotation=field.annotation,
                    kind=griffe.ParameterKind.positional_or_keyword,
                    default=_default(field.value),
                )
    parameters = griffe.Parameters(*fields.values())
    return griffe.Function("__init__", parameters=parameters, parent=of_class)


def _default(value: griffe.Expr | str | None) -> griffe.Expr | str | None:
    """What a field is without an argument: of `eqx.field(default=…)`, the default."""
    if not isinstance(value, griffe.ExprCall) or "field" not in str(value.function):
        return value
    given = {argument.name: argument.value for argument in value.arguments if hasattr(argument, "name")}
    return given.get("default")
