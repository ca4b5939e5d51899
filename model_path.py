def resolve_model(model: str) -> str:
    if model == "tiny":
        from data.tiny import tiny_model_path

        return str(tiny_model_path())
    from policy import resolve_model as resolve

    return resolve(model)
