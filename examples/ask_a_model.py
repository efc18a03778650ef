"""Asks a fine-tuned model a question and shows what the answer is from.

    python examples/ask_a_model.py runs/quickstart/finetune runs/quickstart/corpus \
        "Who commissioned the Taj Mahal?"

Prints the answer with its probability, then a line for each document that was read:
p(document | question), p(answer | document) and its title, and then the titles of the
ten nearest documents with their scores. The probability is the sum of the products.
"""

import argparse

import realm_jax


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", help="model directory of `realm finetune`")
    parser.add_argument("corpus", help="the prepared corpus it was fine-tuned on")
    parser.add_argument("question")
    flags = parser.parse_args()

    model = realm_jax.load(flags.model_dir, flags.corpus)
    answer = model.answer(flags.question)
    print(f"{answer.text or '(no answer)'}  p = {answer.probability:.3f}")
    print("p(document)  p(answer)  title")
    for document in answer.documents:
        chances = f"{document.probability:11.3f}  {document.answer_probability:9.3f}"
        print(f"{chances}  {document.title}")

    print("score  nearest documents")
    for found in model.search(flags.question, k=min(10, model.corpus.num_blocks)):
        print(f"{found.score:5.2f}  {found.title}")


if __name__ == "__main__":
    main()
