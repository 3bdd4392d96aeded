"""Whether the parts of a compiled pipeline that are read are of the kind that they must be. No I/O here."""

from typing import Any, cast

from longstraw_core.spec.errors import SpecError


def check_shape(pipeline: dict[str, Any], source: str) -> None:
    """Refuse a document whose executors, components, tasks or parameters are not what KFP's compiler writes.

    Raises:
        SpecError: the first part that is of another kind, by its path.
    """
    shape = _Shape(source)
    deployment = shape.mapping(pipeline["deploymentSpec"], "deploymentSpec")
    for name, executor in shape.part(deployment, "executors", "deploymentSpec").items():
        place = f"deploymentSpec.executors.{name}"
        fields = shape.mapping(executor, place)
        if "container" in fields:
            shape.container(fields["container"], f"{place}.container")
    shape.body(pipeline["root"], "root")
    for name, component in shape.part(pipeline, "components", "").items():
        shape.body(component, f"components.{name}")


class _Shape:
    def __init__(self, source: str) -> None:
        self.source = source

    def refuse(self, place: str, wanted: str, value: object) -> SpecError:
        found = "" if isinstance(value, list) else f", not {type(value).__name__}"
        return SpecError(f"{self.source}: not a compiled pipeline: {place} must be {wanted}{found}; compile again")

    def mapping(self, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.refuse(place, "a mapping", value)
        return cast("dict[str, Any]", value)

    def part(self, fields: dict[str, Any], name: str, place: str) -> dict[str, Any]:
        """A mapping inside of another one; empty where it is absent."""
        return self.mapping(fields.get(name, {}), f"{place}.{name}".lstrip("."))

    def text(self, fields: dict[str, Any], name: str, place: str) -> None:
        if not isinstance(value := fields.get(name, ""), str):
            raise self.refuse(f"{place}.{name}", "a text", value)

    def texts(self, fields: dict[str, Any], name: str, place: str) -> None:
        value = fields.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[Any]", value)):
            raise self.refuse(f"{place}.{name}", "a list of texts", value)

    def container(self, value: Any, place: str) -> None:
        container = self.mapping(value, place)
        for name in ("command", "args"):
            self.texts(container, name, place)
        variables = container.get("env", [])
        if not isinstance(variables, list):
            raise self.refuse(f"{place}.env", "a list", variables)
        for number, variable in enumerate(cast("list[Any]", variables)):
            self.mapping(variable, f"{place}.env[{number}]")

    def body(self, value: Any, place: str) -> None:
        """The root, or a component: its parameters, and the tasks of its graph."""
        fields = self.mapping(value, place)
        self.text(fields, "executorLabel", place)
        definitions = self.part(fields, "inputDefinitions", place)
        place_of_parameters = f"{place}.inputDefinitions.parameters"
        for name, parameter in self.part(definitions, "parameters", f"{place}.inputDefinitions").items():
            self.mapping(parameter, f"{place_of_parameters}.{name}")
        for name, task in self.part(self.part(fields, "dag", place), "tasks", f"{place}.dag").items():
            self.task(task, f"{place}.dag.tasks.{name}")

    def task(self, value: Any, place: str) -> None:
        fields = self.mapping(value, place)
        self.text(self.part(fields, "componentRef", place), "name", f"{place}.componentRef")
        self.part(fields, "cachingOptions", place)
        inputs = self.part(fields, "inputs", place)
        for name, source in self.part(inputs, "parameters", f"{place}.inputs").items():
            place_of_source = f"{place}.inputs.parameters.{name}"
            self.part(self.mapping(source, place_of_source), "runtimeValue", place_of_source)
