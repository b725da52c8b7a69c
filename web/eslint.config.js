import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["node_modules", "build.mjs", "eslint.config.js"] },
  ...tseslint.configs.recommendedTypeChecked,
  ...tseslint.configs.stylisticTypeChecked,
  {
    languageOptions: { parserOptions: { project: "./tsconfig.json" } },
    rules: {
      eqeqeq: "error",
      "@typescript-eslint/no-explicit-any": "error",
      "@typescript-eslint/no-non-null-assertion": "error",
      // Columns of equal length are walked side by side, by index.
      "@typescript-eslint/prefer-for-of": "off",
      // Names are data: nothing may parse them as markup.
      "no-restricted-properties": [
        "error",
        ...["innerHTML", "outerHTML", "insertAdjacentHTML", "write"].map((property) => ({
          property,
          message: "Names are data: set textContent.",
        })),
      ],
      "no-restricted-syntax": [
        "error",
        {
          selector:
            "AssignmentExpression > MemberExpression.left[property.name=/^(inner|outer)HTML$/]",
          message: "Names are data: set textContent.",
        },
      ],
    },
  },
);
