import json


def write_predictions(path, right):
    lines = [
        {
            "id": str(i),
            "question": f"Question {i}?",
            "answers": ["yes"],
            "prediction": "yes",
            "correct": i < right,
        }
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_two_files_of_predictions_are_compared_in_one_command(tmp_path, realm):
    first = write_predictions(tmp_path / "a.jsonl", 3)
    second = write_predictions(tmp_path / "b.jsonl", 6)
    output = str(tmp_path / "out")
    said, place = realm("compare", first, second, f"--output={output}").splitlines()
    assert said.startswith(
        "After fine-tuning, exact match: 30.0% and 60.0%, +30.0 points (95% interval "
    )
    assert place == f"the comparison is in {output}/compare.html"
    assert (tmp_path / "out" / "compare.html").exists()


def test_what_is_not_there_is_bad_input(tmp_path, refuse):
    words = [tmp_path / "a", tmp_path / "b", f"--output={tmp_path}/out"]
    refuse(["compare", *words], tmp_path / "a")
    assert not (tmp_path / "out").exists()
